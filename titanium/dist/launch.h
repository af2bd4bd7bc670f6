// Starts ranks as processes of this host, and sees to it that they end together.
#pragma once
#include <string>
#include <vector>

namespace titanium {

// Set for the ranks: whoever reads their lines knows the rank, so they need not say it.
constexpr const char* kLauncherVariable = "TITANIUM_LAUNCH";

// Runs `command` (a program and its arguments) `ranks` times with the variables of torchrun (RANK,
// WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and, where it is not set,
// OMP_NUM_THREADS = the rank's share of the cores.  Each line that a rank writes is written here with "[rank]
// " in front; ranks have no standard input.  SIGINT, SIGTERM and SIGHUP are passed on to all, with a
// SIGCONT for those that are stopped; one that is stopped again gets a SIGKILL some seconds later.
//
// When a rank ends with another status than 0, or by a signal, the others are given a moment to find that out
// and say so; those that are left get a SIGTERM, and some seconds later a SIGKILL.  The last line on standard
// error names the rank that failed first, not one that lost another (RankLost).  Returns 0, or that rank's
// status (128 + the signal).  A status of 128 + a signal that was passed on is no failure: the others end so
// too, and so does this.
// No rank outlives this process, not even when it is killed.  One at a time, from a process without threads.
int launch_ranks(int ranks, const std::vector<std::string>& command);

}  // namespace titanium
