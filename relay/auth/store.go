package auth

import (
	"cmp"
	"context"
	"database/sql"
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

	"agentctl/relay/storage"
)

// PollInterval is how often Run checks for revocations and nodes that another process
// wrote.
const PollInterval = time.Second

// Options configure a Store. Only StateDir is required.
type Options struct {
	StateDir string // made with mode 0700 when missing
	// Existing refuses, with ErrNoState, a directory that no relay has set up yet.
	Existing bool
	// StartOver replaces a database, or a relay id, that was lost by a new one, instead of refusing
	// the directory with a StateError.
	StartOver bool
	// Audience is claim aud and iss of every token. Empty keeps what relay.json has,
	// which is "agentctl:<relay id>" at first. Another value is saved, and tokens made
	// for the old one stop working.
	Audience string
	// ScopelessUntil lets agent tokens without a scope claim count as
	// tools:call:read_only until then (RFC-0006 §4.1). Zero, the default, refuses them.
	ScopelessUntil time.Time
	Now            func() time.Time // default time.Now
	Logger         *zap.Logger      // default none
	Watch          *storage.Watch   // sees the disk operations of relay.db; default none
	// WriteTimeout bounds how long a change waits for the disk; then its error has reason
	// "storage". Zero, for commands: as long as it takes.
	WriteTimeout time.Duration
}

// Store is the state directory of a relay. All methods may be called at any time, from
// any goroutine, until Close.
//
// Commands use a Store without Run. Methods that read memory, such as Verify and LookupNode, then do not
// see what other processes change meanwhile; those that read the database do.
type Store struct {
	now              func() time.Time
	log              *zap.Logger
	scopelessUntil   time.Time
	scopelessWarning sync.Once

	dir      *stateDir
	db       *database
	relay    relayInfo
	eventLog func() EventLogRecord // nil: no event log is followed
	closed   atomic.Bool

	// Tokens.
	validator      *jwt.Validator // of aud, iss, exp and nbf
	boundValidator *jwt.Validator // of tokens bound to a key: without nbf (claims.registered)
	cache          tokenCache
	deny           atomic.Pointer[denyList]
	keyring        atomic.Pointer[keyring]
	keysMu         sync.Mutex   // held while the keyring is read from disk and replaced
	keyDrops       atomic.Int64 // keys that were taken out of use; part of Revision
	keyLookup      keyLookup

	// Joining.
	nonces  *nonceMaker
	joining joining

	// Nodes.
	registry     registry
	flushMu      sync.Mutex   // held by flushSeen; taken before registry.mu and database.mu
	seenRevision atomic.Int64 // counts changes of last-seen times

	consentsMu sync.RWMutex // protects consents
	consents   map[string]Consent
}

// Open opens a state directory, or sets one up. It starts no goroutine; Run does.
func Open(o Options) (store *Store, err error) {
	if o.StateDir == "" {
		return nil, errors.New("no state directory given")
	}
	path, err := filepath.Abs(o.StateDir)
	if err != nil {
		return nil, err
	}
	s := &Store{now: o.Now, log: cmp.Or(o.Logger, zap.NewNop()), scopelessUntil: o.ScopelessUntil, nonces: newNonceMaker(),
		registry:  registry{byID: map[string]*node{}, byName: map[nodeName]*node{}},
		keyLookup: keyLookup{slot: make(chan struct{}, 1)}}
	if s.now == nil {
		s.now = time.Now
	}
	defer func() {
		if err != nil {
			store, err = nil, errors.Join(explain(path, err), s.closeFiles())
		}
	}()
	if o.Existing {
		if err := hasState(path); err != nil {
			return nil, err
		}
	}
	if s.dir, err = openStateDir(path); err != nil {
		return nil, err
	}
	if s.db, err = openDatabase(s.dir, o.StartOver); err != nil {
		return nil, err
	}
	s.db.watch, s.db.writeTimeout = o.Watch, o.WriteTimeout
	o.Watch.SetProbe(s.probe)
	return s, s.load(&o)
}

// hasState returns ErrNoState for a directory in which no relay was set up. It changes nothing.
func hasState(path string) error {
	for _, name := range []string{relayFile, dbFile, keysDir, authorityFile, serverFile, swapFile} {
		if _, err := os.Lstat(filepath.Join(path, name)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return ErrNoState
}

// load reads the state directory into memory, and sets it up if it is new.
func (s *Store) load(o *Options) error {
	done, err := s.setUp(o)
	if err != nil {
		return err
	}
	ctx := context.Background()
	// If relay.json could be read, it is only behind now, which is no reason not to start. One that was
	// missing or damaged has to be written: without it, a later loss of relay.db would go unnoticed.
	if err := s.saveRecord(ctx); err != nil && done.audience == "" {
		return err
	} else if err != nil {
		s.warnNotRecorded(err)
	}
	s.db.savedRevision, s.db.onRevoke = s.db.revision, s.saveRecordAfter
	s.logSetUp(done)
	if err := s.loadKeyring(ctx); err != nil {
		return err
	}
	s.warnOfUnrecordedKeys()
	checks := []jwt.ParserOption{jwt.WithAudience(s.relay.Audience), jwt.WithIssuer(s.relay.Issuer), jwt.WithExpirationRequired(), jwt.WithLeeway(Leeway), jwt.WithTimeFunc(s.now)}
	s.boundValidator = jwt.NewValidator(checks...)
	s.validator = jwt.NewValidator(append(checks, jwt.WithNotBeforeRequired())...)
	for _, load := range []func(context.Context) error{s.loadRevocations, s.loadConsents, s.loadMigrating, s.loadNodes} {
		if err := load(ctx); err != nil {
			return err
		}
	}
	return nil
}

// setUpResult is what setUp found and made.
type setUpResult struct {
	isNew    bool   // the directory had no relay
	audience string // that relay.json had; "": the file is new, or was missing or damaged
	madeKey  bool   // the signing key was missing
}

// setUp makes the tables, the relay's id and the first key, or completes what is missing of them.
//
// A process may end after any step. The tables with the relay's id come first, then the first key, then
// relay.json (load). Each of these shows that the one before was there (checkNotSetUp).
func (s *Store) setUp(o *Options) (done setUpResult, err error) {
	err = s.db.setUp(func(tx *sql.Tx, isNew bool) (err error) {
		done.isNew = isNew
		switch err := s.dir.checkNotSetUp(StoreEmpty); {
		case isNew && err != nil && !o.StartOver:
			return err
		case isNew && err == nil && o.Existing:
			return ErrNoState
		}
		if kids, err := listKIDs(s.dir); isNew && len(kids) > 0 { // recordKeys would adopt them, and with them tokens that were revoked
			return errors.Join(fmt.Errorf("%s has keys of the database that was lost; move it away", keysDir), err)
		}
		if s.relay, done.audience, err = s.setUpInfo(tx, o, isNew); err != nil || isNew {
			return err
		}
		done.madeKey, err = recordKeys(s.dir, tx, s.now())
		return err
	})
	if err == nil && done.isNew { // in another transaction: the tables must be durable before the file of the key exists
		err = s.db.write(context.Background(), func(tx *sql.Tx) (err error) {
			_, err = recordKeys(s.dir, tx, s.now())
			return err
		}, nil)
	}
	return done, err
}

// logSetUp logs what setUp made, and what an operator should know of it.
func (s *Store) logSetUp(done setUpResult) {
	switch {
	case done.isNew:
		s.log.Info("state directory set up", zap.String("dir", s.dir.path), zap.String("audience", s.relay.Audience))
	case done.audience == "":
		s.log.Warn(relayFile+" was missing or damaged, and was made anew from "+dbFile+"; nothing is lost", zap.String("dir", s.dir.path), zap.String("relay_id", s.relay.RelayID))
	case done.audience != s.relay.Audience:
		s.log.Warn("the audience changed: tokens created for the old one are refused",
			zap.String("old", done.audience), zap.String("new", s.relay.Audience))
	}
	if done.madeKey {
		s.log.Warn("the signing key was missing, and a new one was made: tokens that the old one signed are void", zap.String("dir", s.dir.path))
	}
}

// Close writes what is still in memory and closes the files. Run must have ended. It gives up a write
// that has not begun after 2*busyTimeout, which loses last-seen times or leaves relay.json behind.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*busyTimeout)
	defer cancel()
	return errors.Join(s.flushSeen(ctx), s.saveRecord(ctx), s.closeFiles())
}

// closeFiles closes what Open has opened, which may be a part.
func (s *Store) closeFiles() (err error) {
	if s.db != nil {
		err = s.db.close()
	}
	if s.dir != nil {
		err = errors.Join(err, s.dir.close())
	}
	return err
}

// Run follows what other processes do to the state directory and writes last-seen
// times and the record of the event log, until ctx ends. It then waits for its goroutines and
// returns nil.
func (s *Store) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	// A write may wait for another process's lock, a revocation must not.
	wg.Go(func() { s.runEvery(ctx, PollInterval, "read revocations", s.Refresh) })
	wg.Go(func() { s.runEvery(ctx, SeenInterval, "save last-seen times", s.flushSeen) })
	wg.Go(func() { s.runEvery(ctx, recordInterval, "save the record of the stores", s.saveRecord) })
	wg.Wait()
	return nil
}

// runEvery calls fn at an interval and logs when it starts and when it stops failing, not
// each failure. While it fails, what was read before stays in force.
func (s *Store) runEvery(ctx context.Context, interval time.Duration, task string, fn func(context.Context) error) {
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
		isWatched := func(err error) bool { return s.db.watch != nil && storage.Classify(err) != "" }
		switch {
		case isWatched(err): // its monitor logs it
		case err != nil && !failing:
			s.log.Error("state directory cannot be used; what is known so far stays in force", zap.String("task", task), zap.Error(err))
		case err == nil && failing:
			s.log.Info("state directory works again", zap.String("task", task))
		}
		failing = err != nil && !isWatched(err)
	}
}

// probe does a durable write that changes nothing: SQLite writes the page of the header and
// syncs it. The monitor of the disk calls it while a fault lasts.
func (s *Store) probe(ctx context.Context) error {
	return s.db.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", len(migrations)))
		return err
	}, nil)
}

// Refresh reads what another process changed since the last time: revocations, signing keys
// and nodes. Run calls it each PollInterval.
func (s *Store) Refresh(ctx context.Context) error {
	var revocations, keys int64
	op := s.db.watch.Begin("read")
	err := s.db.readDB.QueryRowContext(ctx, "SELECT revocations, keys FROM changes").Scan(&revocations, &keys)
	if err == nil && revocations != s.deny.Load().revision {
		err = s.loadRevocations(ctx)
	}
	if err == nil {
		err = s.refreshKeys(ctx, keys)
	}
	if err == nil {
		err = s.loadNodes(ctx) // an index lookup when nothing has changed
	}
	err = explain(s.dir.path, err)
	op.End(err)
	return err
}

// loadRevocations replaces the deny list by what the database has.
func (s *Store) loadRevocations(ctx context.Context) error {
	deny, err := loadDenyList(ctx, s.db.readDB)
	if err == nil {
		s.installDenyList(deny)
	}
	return err
}

// query is forEachRow on the read connection, with errors explained.
//
// One query runs at a time. On a disk that hangs its goroutine is stuck. Its caller gives up, as
// those behind it do, and fn is not called any more.
func (s *Store) query(ctx context.Context, fn func(scan func(...any) error) error, query string, args ...any) error {
	if err := s.db.watch.Stuck(storage.HungAfter); err != nil {
		return err
	}
	read := func(ctx context.Context) error {
		op := s.db.watch.Begin("read")
		err := explain(s.dir.path, forEachRow(ctx, s.db.readDB, fn, query, args...))
		op.End(err)
		return err
	}
	if s.db.writeTimeout == 0 {
		return read(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, s.db.writeTimeout)
	defer cancel()
	var mu sync.Mutex // held while fn runs, which waits for nothing
	callerLeft := false
	row := fn
	fn = func(scan func(...any) error) error {
		mu.Lock()
		defer mu.Unlock()
		if callerLeft {
			return errStopRows
		}
		return row(scan)
	}
	done := make(chan error, 1)
	go func() { done <- read(ctx) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		mu.Lock()
		callerLeft = true
		mu.Unlock()
		err = ctx.Err()
	}
	return storage.TimedOut(dbFile, err)
}

// Audience returns claim aud of tokens for this relay.
func (s *Store) Audience() string { return s.relay.Audience }

// Issuer returns claim iss of tokens of this relay.
func (s *Store) Issuer() string { return s.relay.Issuer }
