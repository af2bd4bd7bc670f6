// A machine on paper: what `titanium plan --simulate hardware.toml` reads and `--calibrate` measures.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace titanium {

// Of one rank.  Rates are what its kernels reach, not peaks of a data sheet.
struct Hardware {
  double matmul = 0;           // [compute] FLOP/s of a layer's matrix products, forward
  double matmul_backward = 0;  // the same of both gradients
  double attention = 0;        // FLOP/s of causal attention (the half below the diagonal), forward
  double attention_backward = 0;
  double head = 0;      // FLOP/s of the head, as the products of its forward and backward
  double action = 0;    // seconds that every action costs besides
  double update = 0;    // [memory] bytes/s of masters, gradients and state in norm, clip and optimizer
  double copy = 0;      // bytes/s: casts, rows of the embedding
  double capacity = 0;  // bytes that a rank may hold; 0: not known
  bool overlap = true;  // [links] transfers go on beside compute
  struct Link {
    double bandwidth = 0;  // bytes/s into a rank
    double latency = 0;    // seconds of a collective
  };
  Link dp_shard, dp_replicate, tp,
      pp;  // [links.dp_shard], ...; [links] bandwidth and latency are the default

  // BadConfig names the file, the line, the key, what was given and what is allowed; every rate must be there.
  static Hardware parse(std::string_view toml, const std::string& source);
  static Hardware load(const std::filesystem::path& file);
  std::string toml(const std::string& comment) const;
};

}  // namespace titanium
