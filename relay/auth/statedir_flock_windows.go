package auth

import "errors"

// flock refuses: a relay and its state directory are on Linux.
func (d *stateDir) flock(bool) error {
	return errors.New("a state directory cannot be locked on Windows")
}
