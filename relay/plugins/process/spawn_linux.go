package process

import "syscall"

// endWithUs has the kernel kill a plugin's process when the relay ends without a chance
// to stop it, by SIGKILL say. What that process started has to see the end of its input.
func endWithUs(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
