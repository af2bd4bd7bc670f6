// How compute threads wait.
#pragma once

namespace titanium {

// For the first line of a main(): compute threads that have nothing to do soon sleep.  Left alone, those of
// libgomp spin at every barrier, and on a machine with any other work a step then takes ten times as long
// (docs/log.md).  libgomp reads its settings when it is loaded, before anything of ours can run, so this
// starts the program again with GOMP_SPINCOUNT=10000, once.  OMP_WAIT_POLICY or GOMP_SPINCOUNT in the
// environment win.  Returns when there is nothing to do, or where the program cannot be started again.
void let_idle_threads_sleep(char** argv);

}  // namespace titanium
