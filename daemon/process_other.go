//go:build !linux

package daemon

// RelaxTimers does nothing: only Linux has a timer slack.
func RelaxTimers() {}

func unmapProgram() {}
