// Arguments of a request, and batches, losses and results as messages hold them (docs/serve.md).
#pragma once
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "titanium/engine/engine.h"
#include "titanium/serve/wire.h"

namespace titanium {

// The JSON arguments of a call.  Everything throws BadConfig with the method and the key.
class Arguments {
 public:
  // Refuses keys that are not among `allowed`.
  Arguments(const Message& call, std::initializer_list<const char*> allowed);

  bool has(const char* key) const;  // there, and not null
  const Json& at(const char* key) const;
  std::string text(const char* key) const;
  std::string path(const char* key) const;  // text without a NUL
  bool flag(const char* key, bool absent) const;
  int64_t integer(const char* key) const;
  int64_t integer(const char* key, int64_t absent) const;
  double number(const char* key) const;

 private:
  [[noreturn]] void wrong(const char* key, const char* expected) const;
  std::string method_;
  const Json& json_;
};

// Keys of a call with a batch, beside `more`; tensors input_ids [N], offsets [B + 1], and, where they are
// there, loss_mask [N], temperature [B], group [B], columns.<name> [N], seq_columns.<name> [B].  BadData.
EngineBatch read_batch(const Message& call, const Arguments& args);

// [N] of any integer dtype, or of any dtype.  BadData names the tensor.
std::vector<int64_t> read_integers(const Message& message, std::string_view tensor);
std::vector<double> read_numbers(const TensorView& view);
at::Tensor read_tensor(const TensorView& view);  // a copy, of a floating dtype

void add_tensor(Message& message, std::string name, const at::Tensor& tensor);
void add_output(Message& reply, const EngineOutput& output);
Json reports_json(const Reports& reports);
Reports read_reports(const Json& json);

Json param_groups_json(const std::vector<ParamGroup>& groups);
std::vector<ParamGroup> read_param_groups(const Json& json);
SyncOptions read_sync_options(const Arguments& args);

}  // namespace titanium
