package login

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	"agentctl/config"
	"agentctl/enrollment"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// Times of refreshes.
//
// refreshAt leaves 24 minutes of an hour for attempts while the relay is away. A token is refreshed only
// when it is asked for, so one that nobody used for an hour is refreshed after its end, which the key allows.
// lockPoll is short, because people wait for commands.
const (
	refreshAt    = 0.6              // of a token's life, by this machine's clock
	defaultLife  = time.Hour        // of a token that does not say it
	retryRefresh = 10 * time.Second // after a failure that may pass, while the token still serves
	lockPoll     = 50 * time.Millisecond
	maxLockWait  = 45 * time.Second // longer than one refresh may take (30 s in package enroll)
)

// Context is an opened context. It may be used concurrently.
//
// Its relay, pin and TLS configuration are those of the file when it was opened. A refresh that finds
// another relay in the file fails: a token must not go to a relay that the caller did not open.
type Context struct {
	store Store
	name  string
	tls   *tls.Config
	relay string

	refresh func(context.Context, enroll.RefreshOptions) (*enrollment.TokenAnswer, error) // enroll.Client.Refresh

	mu      sync.Mutex // protects the fields below; held during a refresh, so that there is one at a time
	cred    credential // its token may be newer than the one on the disk
	nextTry time.Time  // of a refresh that failed
}

// RefreshError reports a context whose token cannot be refreshed. Temporary reports whether a
// repeat may help; a new invite is needed if not.
type RefreshError struct {
	Context string
	Err     error // *enroll.Error, *FileError or an error of the lock
}

func (e *RefreshError) Error() string {
	return fmt.Sprintf("context %s: refresh the token: %v", e.Context, e.Err)
}

// Unwrap returns the cause.
func (e *RefreshError) Unwrap() error { return e.Err }

// Temporary implements the interface that package client looks for. Only what a new invite alone repairs is
// final: a refusal of the key or of the generation, and a damaged file.
func (e *RefreshError) Temporary() bool {
	return !enroll.IsFinal(e.Err) && !errors.Is(e.Err, ErrDamaged)
}

// Open opens a context; name "" is the current one. It reads files and sends nothing. Its errors are
// ErrNoContext, FileError, that of a name that no context can have, and that of the authority's file.
func (s Store) Open(name string) (*Context, error) {
	if name == "" {
		current, err := s.Current()
		if err != nil {
			return nil, &FileError{s.Dir, err}
		}
		if current == "" {
			return nil, ErrNoContext
		}
		name = current
	}
	if err := CheckName(name); err != nil {
		return nil, err
	}
	cred, err := s.load(name)
	if err != nil {
		return nil, err
	}
	c := &Context{store: s, name: name, relay: cred.Relay, cred: *cred}
	client := enroll.Client{URL: cred.Relay}
	if client.TLS, err = config.ClientTLS(cred.CAFile, cred.CASHA256); err != nil {
		return nil, fmt.Errorf("context %s: %w", name, err)
	}
	c.tls, c.refresh = client.TLS, client.Refresh
	return c, nil
}

// Name returns the context's name.
func (c *Context) Name() string { return c.name }

// Relay returns the relay's base URL.
func (c *Context) Relay() string { return c.relay }

// TLS returns the configuration of connections to the relay, with its pin if it has one.
func (c *Context) TLS() *tls.Config { return c.tls.Clone() }

// Token returns a token, and refreshes it first when much of its life is over. refused is a
// token that the relay has just refused, "" for none: another one is made if there is none yet.
// The signature is that of client.Options.NewToken.
//
// Whether a token is due follows from how long this machine has had it, and not by its expiry:
// the clocks of the two may differ by any amount. While a refresh fails for a passing reason
// the present token is returned, since it may still be valid; so a relay that is away is
// reported by the request itself.
//
// Calls of one Context wait for a refresh that is under way, and their ctx does not end that wait: the
// refresh is bounded by maxLockWait and the timeout of package enroll.
func (c *Context) Token(ctx context.Context, refused string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	isRefused := refused != "" && refused == c.cred.Token
	if !isRefused && (!c.cred.isDue(time.Now()) || time.Now().Before(c.nextTry)) {
		return c.cred.Token, nil
	}
	err := c.refreshStored(ctx, isRefused)
	switch {
	case err == nil:
		c.nextTry = time.Time{}
		return c.cred.Token, nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	}
	refreshErr := &RefreshError{c.name, err}
	if isRefused || !refreshErr.Temporary() {
		return "", refreshErr
	}
	c.nextTry = time.Now().Add(retryRefresh)
	return c.cred.Token, nil
}

// isDue reports whether a token should be refreshed. A clock that was set back makes it due: the age is not
// known then, and a refresh too many costs one request.
func (c *credential) isDue(now time.Time) bool {
	age := now.UnixMilli() - c.ReceivedMS
	return age < 0 || age > int64(refreshAt*float64(c.life().Milliseconds()))
}

// life is how long the token is valid from its issue on.
func (c *credential) life() time.Duration { return cmp.Or(enroll.TokenLife(c.Token), defaultLife) }

// refreshStored refreshes the token under the lock of the credential's file, or takes the one
// that another process has stored meanwhile.
//
// What is sent is always what the disk has. That a token cannot be stored, on a full disk, is
// therefore no error: the next refresh has the same generation and request id, and the relay
// answers it with the same generation.
//
// A token on the disk that differs from the one in memory is another process's, and is taken if its
// generation is not older. This also ends the case in which several processes were refused the same token:
// the first refreshes, the others find its result.
func (c *Context) refreshStored(ctx context.Context, isRefused bool) error {
	path := c.store.path(c.name)
	release, err := lockFile(ctx, path)
	if err != nil {
		return err
	}
	defer release()
	disk, err := c.store.load(c.name)
	if err != nil {
		return err
	}
	key, err := enrollment.ParsePrivateKey(disk.PrivateKey)
	if err != nil {
		return err
	}
	switch {
	case disk.Relay != c.relay || disk.CASHA256 != c.cred.CASHA256:
		return fmt.Errorf("the context was changed to another relay meanwhile")
	case disk.Token != c.cred.Token && disk.Gen >= c.cred.Gen && !disk.isDue(time.Now()):
		c.cred = *disk // another process refreshed it
		return nil
	}
	a, err := c.refresh(ctx, enroll.RefreshOptions{AgentID: disk.AgentID, Gen: disk.Gen, RequestID: disk.RequestID, Key: key})
	if err != nil {
		return err
	}
	disk.Token, disk.Gen, disk.ExpiresAtMS, disk.ReceivedMS, disk.RequestID = a.Token, a.Gen, a.ExpiresAtMS, nowMS(), link.NewID()
	c.cred = *disk
	_ = save(path, disk) // see above
	return nil
}

func nowMS() int64 { return time.Now().UnixMilli() }
