// The engine's functions, registered as operators.
#include "kernels.h"
#include "tile/tile.h"

#include <torch/library.h>

namespace streamkl::cpu {

TORCH_LIBRARY(streamkl_cpu, library) {
  library.def("native(ScalarType dtype) -> bool", &native);
  library.def("logsumexp(Tensor q, Tensor k, Tensor? w, Tensor table, float scale, bool relu, int left, int right, int key_span) -> (Tensor, Tensor)");
  library.def("paired_rows(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor table, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("mixture_rows(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, Tensor table, Tensor m_a, Tensor ln_l_a, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span, int runs) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("backward(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, Tensor table, Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b, Tensor mean, Tensor row_grad, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span, int runs, bool want_a, bool want_b) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("train(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, Tensor table, Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b, Tensor weight, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span, int runs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("index_topk(Tensor q, Tensor k, Tensor? w, Tensor table, float scale, bool relu, bool normalised, bool sorted, int topk, int query_blocks, int query_block, int left, int right) -> Tensor");
  library.def("attention_topk(Tensor q, Tensor k, Tensor m, Tensor ln_l, Tensor table, float scale, int topk, int query_blocks, int query_block, int left, int right) -> Tensor");
  library.def("first_wrong_row(Tensor topk, int nk) -> int");
  library.def("sparse_attention(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor table, int query_block, float scale, int left, int right, bool for_backward, Tensor? page_table) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("sparse_attention_backward(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor table, int query_block, float scale, int left, int right, Tensor out, Tensor rest, Tensor m, Tensor ln_l, Tensor d_out, Tensor? d_lse) -> (Tensor, Tensor, Tensor)");
  library.def("gathered_logsumexp(Tensor q, Tensor k, Tensor? w, Tensor table, Tensor topk, float scale, bool relu, int left, int right, int key_span) -> (Tensor, Tensor)");
  library.def("gathered_paired_rows(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor table, Tensor topk, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("gathered_mixture_rows(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, Tensor table, Tensor topk, Tensor m_a, Tensor ln_l_a, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span, int runs) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("gathered_backward(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, Tensor table, Tensor topk, Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b, Tensor mean, Tensor row_grad, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span, int runs, bool want_a, bool want_b) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("gathered_train(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, Tensor table, Tensor topk, Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b, Tensor weight, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, int key_span, int runs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(streamkl_cpu, CPU, library) {
  library.impl("logsumexp", &logsumexp);
  library.impl("paired_rows", &paired_rows);
  library.impl("mixture_rows", &mixture_rows);
  library.impl("backward", &backward);
  library.impl("train", &train);
  library.impl("index_topk", &index_topk);
  library.impl("attention_topk", &attention_topk);
  library.impl("first_wrong_row", &first_wrong_row);
  library.impl("sparse_attention", &sparse_attention);
  library.impl("sparse_attention_backward", &sparse_attention_backward);
  library.impl("gathered_logsumexp", &gathered_logsumexp);
  library.impl("gathered_paired_rows", &gathered_paired_rows);
  library.impl("gathered_mixture_rows", &gathered_mixture_rows);
  library.impl("gathered_backward", &gathered_backward);
  library.impl("gathered_train", &gathered_train);
}

}  // namespace streamkl::cpu
