package process

import "syscall"

// killWithParent makes Linux kill a plugin's process when the relay ends without stopping
// it, for example by SIGKILL. Children of the plugin have to notice the end of their input.
func killWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
