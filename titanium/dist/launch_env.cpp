#include "titanium/dist/launch_env.h"

#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "titanium/base/error.h"

namespace titanium {
namespace {

struct Names {
  const char *rank, *size, *local_rank, *local_size;
};
constexpr Names kFamilies[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
};
constexpr const char* kSlurmRank = "SLURM_PROCID";

const char* set_one(const GetEnv& get, const char* name) {
  const char* text = name == nullptr ? nullptr : get(name);
  return text != nullptr && *text != 0 ? text : nullptr;
}

// -1 when it is not set.
int number(const GetEnv& get, const char* name, int least, int most) {
  const char* text = set_one(get, name);
  if (text == nullptr) return -1;
  const std::string_view view(text);
  int value = 0;
  const auto result = std::from_chars(view.data(), view.data() + view.size(), value);
  if (result.ec != std::errc() || result.ptr != view.data() + view.size() || value < least || value > most) {
    throw BadConfig("the environment says {}={}: allowed: an integer from {} to {}", name, text, least, most);
  }
  return value;
}

}  // namespace

LaunchEnv read_launch_env(const GetEnv& get) {
  LaunchEnv env;
  constexpr int kMost = 1 << 24;
  for (Names names : kFamilies) {
    const bool slurm = std::string_view(names.rank) == kSlurmRank;
    if (slurm && set_one(get, "SLURM_STEP_ID") == nullptr) continue;
    if (slurm && set_one(get, names.size) == nullptr) names.size = "SLURM_NTASKS";
    const bool torchrun = names.rank == std::string_view("RANK");
    if (set_one(get, names.rank) == nullptr) {
      if (torchrun && set_one(get, names.size) != nullptr) {
        throw BadConfig("the environment says {}={} but not {}: both are needed, or none", names.size,
                        get(names.size), names.rank);
      }
      continue;
    }
    env.by = names.rank;
    env.rank = number(get, names.rank, 0, kMost);
    env.size = number(get, names.size, 1, kMost);
    if (env.size < 0) {
      throw BadConfig("the environment says {}={} but not {}: both are needed, or none", names.rank, env.rank,
                      names.size);
    }
    if (env.rank >= env.size) {
      throw BadConfig("the environment says {}={}, {}={}: a rank is below the number of ranks", names.rank,
                      env.rank, names.size, env.size);
    }
    env.local_rank = number(get, names.local_rank, 0, kMost);
    env.local_size = number(get, names.local_size, 1, kMost);
    if (slurm && number(get, "SLURM_STEP_NUM_NODES", 1, kMost) == 1) env.local_size = env.size;
    if (env.local_size > env.size) {
      throw BadConfig("the environment says {}={}, {}={}: a host holds no more ranks than there are",
                      names.local_size, env.local_size, names.size, env.size);
    }
    if (env.local_size > 0 && env.local_rank >= env.local_size) {
      throw BadConfig(
          "the environment says {}={} of {} ranks on this host: a local rank is below their number",
          names.local_rank, env.local_rank, env.local_size);
    }
    break;
  }
  if (env.by.empty()) return env;

  if (const char* addr = set_one(get, "MASTER_ADDR")) {
    env.master_addr = addr;
    env.addr_given = true;
  }
  if (const int port = number(get, "MASTER_PORT", 1, std::numeric_limits<uint16_t>::max()); port > 0) {
    env.master_port = port;
    env.port_given = true;
  }
  for (const char* name : {"SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"}) {
    if (const char* text = set_one(get, name); text != nullptr && !env.port_given)
      env.job += std::string(text) + ".";
  }
  return env;
}

LaunchEnv read_launch_env() {
  return read_launch_env([](const char* name) { return static_cast<const char*>(std::getenv(name)); });
}

bool LaunchEnv::one_host() const {
  if (local_size > 0) return local_size == size;
  return !addr_given || master_addr == "localhost" || master_addr == "::1" || master_addr.starts_with("127.");
}

}  // namespace titanium
