package auth

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/zap"
)

// PollInterval is how often Run looks for revocations and nodes that another process
// wrote.
const PollInterval = time.Second

// Options configure a Store.
type Options struct {
	StateDir string // made with mode 0700 when missing
	// Existing refuses, with ErrNoState, a directory that no relay has set up yet.
	Existing bool
	// Audience is claim aud and iss of every token. Empty keeps what relay.json says,
	// at first "agentctl:<relay id>". Another value is kept from then on, and tokens
	// made for the old one stop working.
	Audience string
	// ScopelessUntil lets agent tokens without a scope claim count as
	// tools:call:read_only until then (RFC-0006 §4.1). Zero, the default, refuses them.
	ScopelessUntil time.Time
	Now            func() time.Time // default time.Now
	Logger         *zap.Logger      // default none
}

// Store is the state directory of a relay. All methods may be called at any time, from
// any goroutine, until Close.
type Store struct {
	now              func() time.Time
	log              *zap.Logger
	scopelessUntil   time.Time
	scopelessWarning sync.Once

	dir     *stateDir
	db      *database
	relay   relayInfo
	keyring *keyring
	parser  *jwt.Parser

	cache    tokenCache
	deny     atomic.Pointer[denyList]
	registry registry
	flushMu  sync.Mutex // one flushSeen at a time
	closed   atomic.Bool

	cacheHits, signatureChecks, refused, pollErrors atomic.Uint64
}

// Open opens a state directory, or sets one up. It starts no work of its own; Run does.
func Open(o Options) (*Store, error) {
	s := &Store{now: o.Now, log: o.Logger, scopelessUntil: o.ScopelessUntil, registry: registry{byID: map[string]*node{}}}
	if s.now == nil {
		s.now = time.Now
	}
	if s.log == nil {
		s.log = zap.NewNop()
	}
	var err error
	if o.Existing {
		if _, err := os.Lstat(filepath.Join(o.StateDir, relayFile)); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("state directory %s: %w; name the relay's with --state-dir", o.StateDir, ErrNoState)
		} else if err != nil {
			return nil, explain(o.StateDir, err)
		}
	}
	if s.dir, err = openStateDir(o.StateDir); err != nil {
		return nil, err
	}
	if s.db, err = openDatabase(s.dir); err != nil {
		s.dir.close()
		return nil, err
	}
	if err := s.load(o.Audience); err != nil {
		s.db.close()
		s.dir.close()
		return nil, err
	}
	return s, nil
}

func (s *Store) load(audience string) error {
	err := s.db.setUp(func() error {
		relay, before, err := loadRelayInfo(s.dir, audience, s.now())
		if err != nil {
			return err
		}
		keys, made, err := loadKeys(s.dir, relay.Issuer)
		if err != nil {
			return err
		}
		s.relay, s.keyring = relay, keys
		switch {
		case before == "":
			s.log.Info("state directory set up", zap.String("dir", s.dir.path), zap.String("audience", s.relay.Audience))
		case made:
			s.log.Warn("there was no signing key, a new one was made: every token minted before is void", zap.String("dir", s.dir.path))
		case before != s.relay.Audience:
			s.log.Warn("the audience changed: tokens minted for the old one are refused",
				zap.String("old", before), zap.String("new", s.relay.Audience))
		}
		return nil
	})
	if err != nil {
		if sqliteCode(err) != 0 {
			err = explain(s.dir.path, err)
		}
		return err
	}
	s.parser = newParser(s.relay, s.now)
	deny, err := loadDenyList(context.Background(), s.db.readDB)
	if err == nil {
		s.installDenyList(deny)
		err = s.loadNodes(context.Background(), s.db.readDB)
	}
	if err != nil {
		return explain(s.dir.path, err)
	}
	return nil
}

// Close writes what is still in memory and closes the files. Run has ended by then.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*busyTimeout)
	defer cancel()
	return errors.Join(s.flushSeen(ctx), s.db.close(), s.dir.close())
}

// Run follows what other processes do to the state directory and writes last-seen
// times, until ctx ends. It returns nil then, after both its loops have ended.
func (s *Store) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	// Two loops: a write may wait for another process's lock, a revocation must not.
	wg.Go(func() { s.runEvery(ctx, PollInterval, "read revocations", s.Refresh) })
	wg.Go(func() { s.runEvery(ctx, SeenInterval, "save last-seen times", s.flushSeen) })
	wg.Wait()
	return nil
}

// runEvery calls fn at an interval and logs when it starts and stops failing.
func (s *Store) runEvery(ctx context.Context, interval time.Duration, what string, fn func(context.Context) error) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := fn(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.pollErrors.Add(1)
		}
		switch {
		case err != nil && !failing:
			s.log.Error("state directory cannot be used; what is known so far stays in force", zap.String("task", what), zap.Error(err))
		case err == nil && failing:
			s.log.Info("state directory works again", zap.String("task", what))
		}
		failing = err != nil
	}
}

// Refresh reads what another process changed since the last time: revocations and
// nodes. Run calls it each PollInterval.
func (s *Store) Refresh(ctx context.Context) error {
	var revocations, nodes int64
	// The counters cost 10 us to read, so there is no cheaper question to ask first.
	if err := s.db.readDB.QueryRowContext(ctx, "SELECT revocations, nodes FROM changes").Scan(&revocations, &nodes); err != nil {
		return explain(s.dir.path, err)
	}
	if revocations != s.deny.Load().revision {
		deny, err := loadDenyList(ctx, s.db.readDB)
		if err != nil {
			return explain(s.dir.path, err)
		}
		s.installDenyList(deny)
	}
	s.registry.mu.RLock()
	stale := nodes != s.registry.lastChange
	s.registry.mu.RUnlock()
	if !stale {
		return nil
	}
	return explain(s.dir.path, s.loadNodes(ctx, s.db.readDB))
}

// RelayID is the ULID of this relay, made when its state directory was set up.
func (s *Store) RelayID() string { return s.relay.RelayID }

// Audience is what tokens for this relay have as claim aud.
func (s *Store) Audience() string { return s.relay.Audience }

// Issuer is what tokens of this relay have as claim iss.
func (s *Store) Issuer() string { return s.relay.Issuer }

// Stats are counters since Open and sizes now.
type Stats struct {
	CacheHits   uint64 // tokens known from before
	Checked     uint64 // tokens whose signature was examined
	Refused     uint64 // answers of Verify that were an error
	PollErrors  uint64 // failed rounds of Run; while they go on, revocations made elsewhere are not seen
	Cached      int
	Nodes       int
	Revocations int
}

// Stats reads the counters.
func (s *Store) Stats() Stats {
	d := s.deny.Load()
	s.registry.mu.RLock()
	nodes := len(s.registry.byID)
	s.registry.mu.RUnlock()
	return Stats{
		CacheHits: s.cacheHits.Load(), Checked: s.signatureChecks.Load(), Refused: s.refused.Load(), PollErrors: s.pollErrors.Load(),
		Cached: s.cache.size(), Nodes: nodes, Revocations: len(d.jti) + len(d.sub) + len(d.node) + len(d.tenant),
	}
}

func (s *Store) warnScopeless(end time.Time) {
	s.scopelessWarning.Do(func() {
		s.log.Warn("a token without a scope was accepted as tools:call:read_only; mint new ones (agentctl token create) before the tolerance ends",
			zap.Time("until", end))
	})
}
