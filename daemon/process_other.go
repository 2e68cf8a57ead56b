//go:build !linux

package daemon

func relaxTimers() {}

func unmapProgram() {}
