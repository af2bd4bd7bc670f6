// Where a server waits for clients.
#pragma once
#include <string>

#include "titanium/serve/connection.h"

namespace titanium {

// "unix:/path/of/socket"   a socket file, readable by its owner only
// "unix:@name"             Linux's abstract names: no file, so nothing stays behind whatever happens
// "tcp:127.0.0.1:4444"     loopback only ("[::1]" too): nothing is encrypted, nobody is asked for a password.
//                          Port 0 takes a free one.
class Listener {
 public:
  // BadConfig: an address of another form, one that is not loopback, or one that is taken.  The socket file
  // of a server that died is taken over.
  explicit Listener(const std::string& address);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  const std::string& address() const { return address_; }  // as above, with the port that was taken
  int fd() const { return fd_.get(); }

  // The next client, or an empty Fd when it went away again.  A Unix socket refuses other users' processes.
  Fd accept();
  void remove_file() noexcept;  // what the destructor does, for a process that ends without it

 private:
  void bind_unix(const std::string& path);
  void bind_tcp(const std::string& host_and_port);

  std::string address_, path_;
  Fd fd_;
};

}  // namespace titanium
