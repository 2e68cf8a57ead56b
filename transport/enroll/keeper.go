package enroll

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"math/rand/v2"
	"sync"
	"time"

	"agentctl/atomicfile"
	"agentctl/enrollment"
	"agentctl/transport/link"
	"agentctl/transport/pin"
)

// KeeperOptions configure a Keeper.
type KeeperOptions struct {
	StateDir   string
	Credential *Credential   // that is in StateDir
	InstanceID string        // of the identity, for a credential that does not know it
	TLS        *tls.Config   // used when the credential has no pin; nil: the system's authorities
	SessionID  func() string // of the board's link while it is ready, else ""
	OnToken    func()        // a new token is there: a link that waits may dial
	OnError    func(error)   // a refresh failed, or its result could not be stored; for the log
}

// Keeper keeps the token of a credential valid, as long as Run runs. It may be used
// concurrently; its callbacks run in the goroutine of Run.
//
// The expiry is computed from what the relay says and by the monotonic clock, never by the wall
// clock of this machine: a token read from the disk is tried, and refreshed when the relay
// refuses it.
type Keeper struct {
	opt     KeeperOptions
	refresh func(context.Context, RefreshOptions) (*enrollment.TokenAnswer, error)
	wake    chan struct{} // capacity 1: due has changed
	running chan error    // result of the attempt in progress; nil: none. Owned by the goroutine of Run.

	mu        sync.Mutex    // protects the fields below
	cred      Credential    // in use; its token and gen may be newer than those on the disk
	disk      Credential    // as last read from the disk, or written to it
	after     time.Duration // from the issue of the token to its refresh
	due       time.Time     // of the next refresh; zero: not known
	refused   bool          // the relay refused the token since the last refresh
	failures  int           // refreshes that failed in a row
	rejected  int           // new tokens that the relay refused in a row
	refreshed time.Time     // last success; zero: none
	status    KeeperStatus
}

// KeeperStatus describes the state of a token.
type KeeperStatus struct {
	ExpiresAtMS int64     // by the relay's clock
	LastErr     error     // of the last refresh; nil: it succeeded
	LastErrAt   time.Time // of LastErr
	NextTry     time.Time // of the next refresh; zero: not known
	NotStored   error     // why the newest token is in memory only
}

// When a token is refreshed:
//
//	Ready                   between half and three quarters of its life after its issue; if that is over,
//	                        within a minute
//	Refused                 at once
//	Refused, a minute or    after 2 s to 1 h: the relay issues tokens and does not accept them
//	less after a refresh
//	failure                 after 30 s to 15 min, or 2 s to 5 min while the relay refuses the token
//	failure that is final   after an hour: only a person can change that (IsFinal)
//
// Pauses after other failures double with each one, within their bounds; jitter shortens them by up to a
// half, and a Retry-After of the relay makes them longer.

// Times of refreshes.
const (
	refreshEarliest = 0.5  // of a token's life
	refreshLatest   = 0.75 // the rest is for retries
	defaultLife     = 24 * time.Hour
	maxOverdueWait  = time.Minute
	minRefreshPause = 30 * time.Second // between failures, while the token is accepted
	maxRefreshPause = 15 * time.Minute
	minRefusedPause = 2 * time.Second // between failures, while there is no link
	maxRefusedPause = 5 * time.Minute
	finalPause      = time.Hour // after a refusal that only a person can end
	// attemptTimeout is longer than the timeouts of a refresh's requests together.
	attemptTimeout = 2 * time.Minute
	endGrace       = time.Second
	// linkPollInterval is how often a refresh that is due checks whether the link is up.
	linkPollInterval = 5 * time.Second
	// A token that is refused this soon after it was refreshed counts as a failure: to refresh
	// it again at once would be a loop.
	refusedTooSoon = time.Minute
)

// NewKeeper makes a Keeper. Run does the work.
func NewKeeper(o KeeperOptions) (*Keeper, error) {
	c := Client{URL: o.Credential.Relay, TLS: o.TLS}
	if o.Credential.CASHA256 != "" {
		var err error
		if c.TLS, err = pin.ClientConfig(o.Credential.CASHA256); err != nil {
			return nil, err
		}
	}
	k := &Keeper{opt: o, refresh: c.Refresh, wake: make(chan struct{}, 1), cred: *o.Credential, disk: *o.Credential}
	k.status.ExpiresAtMS = k.cred.ExpiresAtMS
	k.after = refreshAfter(k.lifeLocked())
	return k, nil
}

// Token returns the newest token.
func (k *Keeper) Token() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.cred.Token
}

// Sign makes a proof with the board's key.
func (k *Keeper) Sign(message []byte) string { return enrollment.Sign(k.opt.Credential.Key, message) }

// Status is a snapshot.
func (k *Keeper) Status() KeeperStatus {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.status
}

// Refused records that the relay did not accept the token, which is then refreshed at once. If that
// happens soon after a refresh, the next one waits.
func (k *Keeper) Refused() {
	k.mu.Lock()
	if !k.refused {
		k.refused = true
		if k.refreshed.IsZero() || time.Since(k.refreshed) > refusedTooSoon {
			k.due = time.Now()
		} else {
			k.rejected++
			k.due = time.Now().Add(k.pauseLocked())
		}
	}
	k.mu.Unlock()
	k.wakeRun()
}

// Ready records that the relay accepted the token at relayMS by its clock, and plans the refresh. A
// refresh that waits after a failure keeps its time. One that is overdue gets a random time soon, since
// many boards may come back at once.
func (k *Keeper) Ready(relayMS int64) {
	k.mu.Lock()
	k.refused, k.rejected = false, 0
	if k.failures == 0 {
		// Both times are the relay's. left is bounded, in case the two are not of one clock.
		life := k.lifeLocked()
		left := min(max(time.Duration(k.cred.ExpiresAtMS-relayMS)*time.Millisecond, 0), life)
		wait := left - life + k.after
		if wait <= 0 {
			wait = rand.N(min(maxOverdueWait, left/2) + 1)
		}
		k.due = time.Now().Add(wait)
		k.status.NextTry = k.due
	}
	k.mu.Unlock()
	k.wakeRun()
}

// wakeRun makes Run compute its wait again.
func (k *Keeper) wakeRun() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// lifeLocked is how long the present token is valid from its issue on.
func (k *Keeper) lifeLocked() time.Duration {
	return cmp.Or(TokenLife(k.cred.Token), defaultLife)
}

// refreshAfter returns the time from the issue of a token to its refresh. The jitter spreads the boards
// that joined, or came back, at the same time.
func refreshAfter(life time.Duration) time.Duration {
	return time.Duration((refreshEarliest + (refreshLatest-refreshEarliest)*rand.Float64()) * float64(life))
}

// pauseLocked returns the time to wait after the failures so far. It grows longest while the relay
// issues tokens and then refuses them: each of those costs a write to the disk, and the link retries
// the newest one by its own back-off.
func (k *Keeper) pauseLocked() time.Duration {
	lo, hi := minRefreshPause, maxRefreshPause
	switch {
	case k.rejected > 0 && k.failures == 0:
		lo, hi = minRefusedPause, finalPause
	case k.refused:
		lo, hi = minRefusedPause, maxRefusedPause
	}
	d := min(lo<<min(max(k.failures+k.rejected-1, 0), 10), hi)
	return d/2 + rand.N(d/2+1)
}

// Run refreshes the token when it is due, until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		k.mu.Lock()
		due := k.due
		k.mu.Unlock()
		wait := time.Duration(-1) // not known
		if !due.IsZero() {
			wait = time.Until(due)
			if wait <= 0 && k.mayRefresh() {
				k.refreshNow(ctx)
				if ctx.Err() != nil {
					return ctx.Err()
				}
				continue
			}
			if wait <= 0 {
				wait = linkPollInterval
			}
		}
		if wait >= 0 {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-k.wake:
		case <-timer.C:
		}
	}
}

// mayRefresh reports whether the relay can distinguish this installation from a copy: the link is up,
// whose session the request names, or the token was refused, so that no link can be opened. Otherwise
// a link that is opened while the request is on its way would look like another installation.
func (k *Keeper) mayRefresh() bool {
	k.mu.Lock()
	refused := k.refused
	k.mu.Unlock()
	return refused || k.opt.SessionID() != ""
}

// errGone reports a credential that another process removed or replaced. The daemon, which watches the
// file, then ends this Keeper.
var errGone = errors.New("the credential on the disk is another one")

// refreshNow makes one attempt and plans the next one.
func (k *Keeper) refreshNow(ctx context.Context) {
	err := k.attempt(ctx)
	k.mu.Lock()
	if err == nil {
		k.failures, k.refused, k.refreshed = 0, false, time.Now()
		k.status.LastErr = nil
		k.after = refreshAfter(k.lifeLocked())
		k.due = time.Now().Add(k.after)
	} else {
		k.failures++
		pause := k.pauseLocked()
		var e *Error
		if IsFinal(err) || errors.Is(err, errGone) {
			pause = finalPause + rand.N(finalPause/10)
		} else if errors.As(err, &e) {
			pause = max(pause, e.RetryAfter)
		}
		k.due = time.Now().Add(pause)
		k.status.LastErr, k.status.LastErrAt = err, time.Now()
	}
	k.status.NextTry, k.status.ExpiresAtMS = k.due, k.cred.ExpiresAtMS
	notStored := k.status.NotStored
	k.mu.Unlock()
	switch {
	case ctx.Err() != nil:
	case err == nil:
		k.opt.OnToken()
		if notStored != nil {
			k.opt.OnError(notStored)
		}
	case !errors.Is(err, errGone):
		k.opt.OnError(err)
	}
}

// errHung reports a refresh that waits for the disk.
var errHung = errors.New("the disk of the state directory does not answer")

// attempt runs refreshStored and waits at most attemptTimeout for it. Nothing can end an access to a disk
// that hangs: the goroutine stays, and no other one is started until it returns. The next attempt waits
// for the same goroutine and gets its result.
func (k *Keeper) attempt(ctx context.Context) error {
	if k.running == nil {
		k.running = make(chan error, 1)
		go func(done chan<- error) { done <- k.refreshStored(ctx) }(k.running)
	}
	timeout := time.NewTimer(attemptTimeout)
	defer timeout.Stop()
	select {
	case err := <-k.running:
		k.running = nil
		return err
	case <-timeout.C:
	case <-ctx.Done(): // everything but the disk ends at once
		timeout.Reset(endGrace)
		select {
		case <-k.running:
			k.running = nil
		case <-timeout.C:
		}
		return ctx.Err()
	}
	return errHung
}

// IsFinal reports whether err is a refusal that no repeat changes: only a new invite helps.
func IsFinal(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Kind == Refused && (e.Reason == enrollment.ReasonGenerationUsed ||
		e.Reason == enrollment.ReasonRevoked || e.Reason == enrollment.ReasonProof)
}

// refreshStored refreshes the token with the credential's lock held.
//
// The request is always the one on the disk: as long as its result cannot be stored, the same
// generation and request id are sent again, which the relay answers with the same generation.
// After a restart the board can therefore go on from what the disk has.
func (k *Keeper) refreshStored(ctx context.Context) error {
	release, err := lockCredential(ctx, k.opt.StateDir)
	if err != nil {
		return err
	}
	defer release()
	disk, err := LoadCredential(k.opt.StateDir)
	var damaged *DamagedError
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && disk.NodeID != k.opt.Credential.NodeID:
		return errGone
	case err != nil: // go on with what the disk had: a card that fails must not cost the board its token
		k.mu.Lock()
		known := k.disk
		k.mu.Unlock()
		disk = &known
	}
	isDamaged := errors.As(err, &damaged)
	k.mu.Lock()
	k.disk = *disk
	isNewer := disk.Gen > k.cred.Gen
	if isNewer { // another process has refreshed it
		k.cred = *disk
	}
	k.mu.Unlock()
	if isNewer {
		return nil
	}
	a, err := k.refresh(ctx, RefreshOptions{NodeID: disk.NodeID, Gen: disk.Gen, RequestID: disk.RequestID, SessionID: k.opt.SessionID, Key: disk.Key})
	if err != nil {
		return err
	}
	// From here on the relay knows the new generation. The token is used even if it cannot be stored.
	disk.Token, disk.Gen, disk.ExpiresAtMS, disk.RequestID = a.Token, a.Gen, a.ExpiresAtMS, link.NewID()
	disk.keepInstance(k.opt.InstanceID)
	err = nil
	if isDamaged {
		_, err = atomicfile.SetAside(damaged.Path)
	}
	if err == nil {
		err = disk.save(k.opt.StateDir)
	}
	k.mu.Lock()
	k.cred, k.status.NotStored = *disk, nil
	if err == nil {
		k.disk = *disk
	} else {
		k.status.NotStored = &StorageError{k.opt.StateDir, err}
	}
	k.mu.Unlock()
	return nil
}
