//go:build !windows

package auth

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// flock takes the lock of the directory, or changes it to the other kind. It does not wait:
// ErrInUse. Some network file systems have no locks; there a restore relies on the operator.
func (d *stateDir) flock(exclusive bool) error {
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	switch err := unix.Flock(int(d.lock.Fd()), how|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fmt.Errorf("%w; find it with: fuser -v %s", ErrInUse, d.lock.Name())
	case err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.ENOLCK):
		return err
	}
	return nil
}
