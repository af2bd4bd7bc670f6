// Which rank this process is, as whatever started it says in the environment.
#pragma once
#include <functional>
#include <string>

namespace titanium {

struct LaunchEnv {
  std::string by;  // the variable that holds the rank; empty: nothing started ranks, a world of one
  int rank = 0, size = 1;
  int local_rank = -1, local_size = -1;   // on this host; -1: not said
  std::string master_addr = "127.0.0.1";  // MASTER_ADDR
  int master_port = 29500;                // MASTER_PORT
  bool addr_given = false, port_given = false;
  std::string job;  // sets apart runs that were given no port

  // False when it may be otherwise: not said, and MASTER_ADDR is not this host by name.
  bool one_host() const;
};

using GetEnv = std::function<const char*(const char* name)>;  // std::getenv

// The first family with a rank counts:
//   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE                  torchrun, `titanium launch`, Kubernetes,
//   Ray OMPI_COMM_WORLD_RANK, .._SIZE, .._LOCAL_RANK, .._LOCAL_SIZE     Open MPI PMI_RANK, PMI_SIZE,
//   MPI_LOCALRANKID, MPI_LOCALNRANKS            MPICH, Intel MPI SLURM_PROCID, SLURM_STEP_NUM_TASKS or
//   SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NUM_NODES   srun
// Slurm's count inside a step only: a batch script itself is not a rank.  BadConfig names the variable that
// is missing, is not a number, or does not fit another.
LaunchEnv read_launch_env(const GetEnv& get);
LaunchEnv read_launch_env();

}  // namespace titanium
