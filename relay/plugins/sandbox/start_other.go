//go:build !linux

package sandbox

import (
	"fmt"
	"os/exec"
)

// Available returns why programs cannot be restricted here.
func Available() error { return fmt.Errorf("%w: only Linux has Landlock", errUnavailable) }

// Command returns a command that Start refuses.
func Command(_ Policy, path string, args ...string) *exec.Cmd { return exec.Command(path, args...) }

// Start starts nothing.
func Start(*exec.Cmd) error { return Available() }
