//go:build !unix

package auth

// flock does nothing: a restore relies on the operator, who has stopped the relay.
func (*stateDir) flock(bool) error { return nil }
