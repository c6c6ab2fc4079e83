// The check of top-k indices: the first row that has a key twice, or an index that is no key.
#include "gathered/marks.h"
#include "kernels.h"
#include "tile/threads.h"

#include <algorithm>

namespace streamkl::cpu {

namespace {

constexpr int64_t kRows = 64;  // rows per task

template <typename T>
int64_t first_wrong(const Tensor& topk, int64_t nk) {
  const int64_t topk_heads = topk.size(1), rows = topk.size(2), columns = topk.size(3), all = topk.size(0) * topk_heads * rows;
  FirstRow wrong;
  on_all_threads((all + kRows - 1) / kRows, [&](const auto& next) {
    Marks marks(nk);
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t last = std::min(all, (task + 1) * kRows);
      for (int64_t n = task * kRows; n < last; n++) {
        const T* from = topk.const_data_ptr<T>() + n / (topk_heads * rows) * topk.stride(0) + n / rows % topk_heads * topk.stride(1) +
                        n % rows * topk.stride(2);
        const SelectedRow<T> row{from, columns, topk.stride(3)};
        if (!mark_row(row, nk, marks)) wrong.note(n);
        for (int64_t c = 0; c < columns; c++)
          if (is_key(row[c], nk)) marks.forget(row[c]);
      }
    }
  });
  return wrong.none() ? -1 : wrong.row();
}

}  // namespace

int64_t first_wrong_row(const Tensor& topk, int64_t nk) {
  return topk.scalar_type() == at::kLong ? first_wrong<int64_t>(topk, nk) : first_wrong<int32_t>(topk, nk);
}

}  // namespace streamkl::cpu
