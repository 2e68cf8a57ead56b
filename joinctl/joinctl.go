// Package joinctl joins a board to a relay, and undoes that, from another process than the
// daemon's:
//
//	t, err := joinctl.Find(ctx, joinctl.Options{Socket: path, Source: config.ClientSource("")})
//	joined, err := t.Join(ctx, enroll.JoinOptions{Relay: url, Code: code}, built)
//	status, err := t.WaitReady(ctx, joined.NodeID)
//
// The daemon need not run: what is stored in its state directory counts, and a daemon that runs
// notices it. Files that root stores belong to the owner of that directory, so that the daemon
// of a service can read them.
package joinctl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"agentctl/config"
	"agentctl/control"
	"agentctl/daemon"
	"agentctl/transport/clock"
	"agentctl/transport/enroll"
)

// Options select the board.
type Options struct {
	Socket   string // control socket of its daemon
	StateDir string // "": that of the daemon, or of Source
	Source   config.Source
}

// Target is the board that joins or leaves.
type Target struct {
	StateDir string
	Daemon   *control.Client // nil: no daemon runs with this state directory

	// As configured; "" where a key is not set. origin is where relay is set.
	relay, origin, name, tokenFile, caFile, caSHA256 string
}

// Find finds the board. It asks a daemon that runs for its settings, and reads the files where none
// runs. The caller closes Target.Daemon.
func Find(ctx context.Context, o Options) (*Target, error) {
	cl, err := control.Dial(ctx, o.Socket)
	switch {
	case errors.Is(err, control.ErrNotRunning), errors.Is(err, control.ErrPermission) && o.StateDir != "":
		return fromFiles(o)
	case err != nil:
		return nil, err
	}
	var v config.View
	if err := cl.Call(ctx, control.MethodGetConfig, nil, &v); err != nil {
		cl.Close()
		return nil, err
	}
	if err := cl.CheckDisk(ctx); err != nil {
		cl.Close()
		return nil, err
	}
	t := newTarget(func(key string) string { s, _ := v.Values[key].(string); return s }, v.Origins["relay"])
	t.Daemon = cl
	if o.StateDir != "" && !isSameDir(o.StateDir, t.StateDir) { // the daemon of another board
		cl.Close()
		return fromFiles(o)
	}
	return t, nil
}

// fromFiles finds the board without its daemon.
func fromFiles(o Options) (*Target, error) {
	if o.StateDir != "" {
		o.Source.Flags = config.Settings{"state_dir": {Value: o.StateDir, Origin: "--state-dir"}}
	}
	c, err := o.Source.Load()
	if err != nil {
		return nil, err
	}
	return newTarget(c.Text, c.Settings["relay"].Origin), nil
}

// newTarget takes the settings from text, which returns the value of a key. origin is where relay is set.
func newTarget(text func(key string) string, origin string) *Target {
	return &Target{
		StateDir: text("state_dir"), relay: text("relay"), origin: origin,
		name: text("name"), tokenFile: text("token_file"), caFile: text("ca_file"), caSHA256: text("ca_sha256"),
	}
}

// isSameDir also compares the files themselves: /var/lib/agentctl is a symbolic link where the
// service has a dynamic user.
func isSameDir(a, b string) bool {
	a, _ = filepath.Abs(a)
	if a == filepath.Clean(b) {
		return true
	}
	x, err := os.Stat(a)
	y, err2 := os.Stat(b)
	return err == nil && err2 == nil && os.SameFile(x, y)
}

// Joined is what Join did.
type Joined struct {
	*enroll.Credential
	Already bool // the board belonged to this relay before; the code was not sent
	// Unused names the settings that the join takes the place of; "": none.
	Unused string
}

// Join makes the board a node of a relay. It fills in the state directory and, where o has
// none, the configured name and authority. A configuration that names another relay is a
// *daemon.ConfiguredRelayError: it would take precedence. built is the time of the build, before
// which no certificate is checked.
func (t *Target) Join(ctx context.Context, o enroll.JoinOptions, built time.Time) (*Joined, error) {
	base, err := enroll.BaseURL(o.Relay)
	if err != nil {
		return nil, err
	}
	j := &Joined{}
	if t.relay != "" {
		if configured, err := enroll.BaseURL(t.relay); err != nil || configured != base {
			return nil, &daemon.ConfiguredRelayError{Relay: t.relay, Origin: t.origin}
		}
		j.Unused = fmt.Sprintf("relay (%s)", t.origin)
		if t.tokenFile != "" {
			j.Unused += " and token_file"
		}
	}
	o.StateDir = t.StateDir
	if o.Name == "" {
		o.Name = t.name
	}
	if o.CASHA256 == "" {
		if o.TLS, err = config.ClientTLS(t.caFile, t.caSHA256); err != nil {
			return nil, err
		}
		o.TLS.Time = clock.New(built, nil).TLSTime // a clock without a battery starts in 1970
	}
	j.Credential, j.Already, err = enroll.Join(ctx, o)
	if err != nil {
		return nil, err
	}
	t.reload(ctx)
	return j, nil
}

// reload makes the daemon read the credential now, with a set_config that saves nothing. A
// daemon that does not answer, or has other errors, notices the file by itself.
func (t *Target) reload(ctx context.Context) {
	if t.Daemon != nil {
		_, _ = t.Daemon.SetConfig(ctx, control.Config{Persist: true})
	}
}

// Leave undoes Join; see enroll.Leave. With a daemon it returns when that one works alone, or
// when ctx ends.
func (t *Target) Leave(ctx context.Context) (*enroll.Credential, error) {
	cred, err := enroll.Leave(ctx, t.StateDir)
	if err != nil || t.Daemon == nil {
		return cred, err
	}
	t.reload(ctx)
	_, err = t.poll(ctx, func(s *daemon.Status) bool {
		return s.Join == nil || s.Join.State != daemon.JoinJoined && s.Join.State != daemon.JoinOverridden
	})
	return cred, err
}

// pollInterval is how often a daemon that runs is asked for its status.
const pollInterval = 200 * time.Millisecond

// ErrRefused reports a node whose key the relay refuses: waiting does not help.
var ErrRefused = errors.New("the relay refuses this board")

// WaitReady waits until the daemon's link of a node that joined is ready. The error is
// ErrRefused, or ctx's when that ends first; the status is the last one.
func (t *Target) WaitReady(ctx context.Context, nodeID string) (*daemon.Status, error) {
	ready := func(s *daemon.Status) bool { // a board that keeps its node may have the old link for a moment
		return s.NodeID == nodeID && s.Link.State == daemon.LinkReady && s.Join != nil && s.Join.State == daemon.JoinJoined
	}
	s, err := t.poll(ctx, func(s *daemon.Status) bool {
		return ready(s) || s.Join != nil && s.Join.State == daemon.JoinRefused
	})
	if err == nil && !ready(s) {
		err = ErrRefused
	}
	return s, err
}

// poll asks the daemon for its status until done accepts it or ctx ends, and returns the last one.
func (t *Target) poll(ctx context.Context, done func(*daemon.Status) bool) (*daemon.Status, error) {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	var last *daemon.Status
	for {
		var s daemon.Status
		if err := t.Daemon.Status(ctx, &s); err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return last, err
		}
		last = &s
		if done(last) {
			return last, nil
		}
		select {
		case <-ctx.Done():
			return last, ctx.Err()
		case <-ticker.C:
		}
	}
}

// OtherUsersDaemon reports whether the user who became root by sudo runs a daemon: whether its
// control socket, in one of the usual places, answers.
func OtherUsersDaemon(ctx context.Context, uid string) bool {
	for _, path := range []string{
		filepath.Join("/run/user", uid, "agentctl", "agentctl.sock"),
		filepath.Join(os.TempDir(), "agentctl-"+uid, "agentctl.sock"),
	} {
		if cl, err := control.Dial(ctx, path); err == nil {
			cl.Close()
			return true
		}
	}
	return false
}
