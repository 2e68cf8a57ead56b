//go:build !linux

package daemon

import "context"

// watchNetwork does nothing: only Linux reports changes over rtnetlink. The link has the back-off
// alone.
func (d *Daemon) watchNetwork(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}
