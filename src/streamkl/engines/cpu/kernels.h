// The engine's functions. Tensors are those of problem.py's Inputs; table [sequences, 6] holds its sequences. b_w [B,
// J, Nq] are the weights of a head-summed side b. Row vectors are [B, heads, Nq], contiguous floats. The target of a
// mixture is the largest of the means of its runs of heads, key by key.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace streamkl::cpu {

using at::Tensor;

std::tuple<Tensor, Tensor> logsumexp(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, const Tensor& table, double scale, bool relu,
    int64_t left, int64_t right, int64_t key_span);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> paired_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span);

std::tuple<Tensor, Tensor, Tensor, Tensor> mixture_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean, const Tensor& row_grad,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs, bool want_a, bool want_b);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs);

// The best keys [B, query_blocks, topk], int32, of each query block. Here and in sparse_attention, table [sequences, 7]
// also has the first query block of each sequence. An indexer's scale is positive, or its heads have weights [B, J,
// Nq]. Normalised scores are less the log-sum-exp of their row. Sorted: the best
// come first; otherwise in any order.
Tensor index_topk(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, const Tensor& table, double scale, bool relu,
    bool normalised, bool sorted, int64_t topk, int64_t query_blocks, int64_t query_block, int64_t left, int64_t right);

Tensor attention_topk(
    const Tensor& q, const Tensor& k, const Tensor& m, const Tensor& ln_l, const Tensor& table, double scale, int64_t topk,
    int64_t query_blocks, int64_t query_block, int64_t left, int64_t right);

// The first row of topk [B, topk_heads, Nq, K], counted over all rows, that has a key twice, or an index that is
// neither -1 nor a key from 0 to nk - 1; -1 if there is none.
int64_t first_wrong_row(const Tensor& topk, int64_t nk);

// out [B, H, Nq, Dv] over the selected keys indices [B, query_blocks, K], int32, contiguous; what rounding took from it,
// for a backward of half dtypes; and the row stats m and ln_l [B, H, Nq]. With a page_table [sequences, n], int32 and
// contiguous, k and v are [pages, Hkv, page_size, D], and the k_start of a sequence is counted over all of the table.
std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& table, int64_t query_block,
    double scale, int64_t left, int64_t right, bool for_backward, const std::optional<Tensor>& page_table);

// dQ in the dtype of q, dK and dV in floats, from what sparse_attention returned and the gradient of out, and that of
// the log-sum-exp, d_lse [B, H, Nq], if it has one.
std::tuple<Tensor, Tensor, Tensor> sparse_attention_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& table, int64_t query_block,
    double scale, int64_t left, int64_t right, const Tensor& out, const Tensor& rest, const Tensor& m, const Tensor& ln_l,
    const Tensor& d_out, const std::optional<Tensor>& d_lse);

// The passes over selected keys, topk [B, topk_heads, Nq, K] as in problem.py's Support.

std::tuple<Tensor, Tensor> gathered_logsumexp(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, const Tensor& table, const Tensor& topk, double scale,
    bool relu, int64_t left, int64_t right, int64_t key_span);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gathered_paired_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& topk,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span);

std::tuple<Tensor, Tensor, Tensor, Tensor> gathered_mixture_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& topk, const Tensor& m_a, const Tensor& ln_l_a, double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gathered_backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& topk, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean, const Tensor& row_grad,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs, bool want_a, bool want_b);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gathered_train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& topk, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs);

}  // namespace streamkl::cpu
