//go:build !linux

package process

import "syscall"

// killWithParent does nothing: only Linux has a parent death signal.
func killWithParent(*syscall.SysProcAttr) {}
