package auth

import (
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"database/sql"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/storage"
)

// A signing key is a file keys/<kid>.pem and a row of the table keys. Both are needed: a file
// without a row was put there by somebody else, or is what a rotation left that was cut short,
// and is not used; a row without its file is a key that an operator took away.
//
//	until = 0   the key signs, and verifies; one row
//	until > 0   the key was replaced; it verifies tokens until that second
//
// Rows change in a transaction, so every moment of a rotation leaves a working state.

// Bounds of the keys.
const (
	maxKeyFile = 4 << 10 // bytes
	maxKeys    = 16      // recorded at a time

	// expiredKeyRetention is how long an expired key stays before the next rotation deletes
	// it: if the clock jumps ahead and back, its tokens must work again.
	expiredKeyRetention = 30 * day
)

// keyID identifies a verification key. It is only a key of keyring.public: a kid comes
// from an unverified token, so it is not made part of a path or a URL.
type keyID struct{ issuer, kid string }

var kidRE = lazyregexp.New(`^[A-Za-z0-9_-]{1,64}$`)

// verifyKey is a key that verifies tokens. Identities point to the key that signed their
// token, so that its end is theirs.
type verifyKey struct {
	public ed25519.PublicKey
	until  atomic.Int64 // Unix seconds; 0: no end, keyDropped: it is no key of this relay any more
}

// keyDropped is a value of verifyKey.until in the past of every clock.
const keyDropped = -1

// dropped reports whether the key was taken out of use before its last token expired.
func (k *verifyKey) dropped() bool { return k != nil && k.until.Load() == keyDropped }

// expired reports whether the key verifies nothing at a time in Unix seconds.
func (k *verifyKey) expired(now int64) bool {
	if k == nil { // of an identity that no token made
		return false
	}
	until := k.until.Load()
	return until != 0 && now >= until
}

// keyring is an immutable snapshot of the keys, except for verifyKey.until.
type keyring struct {
	revision int64 // value of changes.keys when it was read
	public   map[keyID]*verifyKey
	signKID  string
	signKey  ed25519.PrivateKey
	sessions [][]byte // derived from each key, the one that signs first; see SessionKeys
}

// keyRow is a row of the table keys.
type keyRow struct {
	kid            string
	public         ed25519.PublicKey
	created, until int64 // Unix seconds
}

// readKeyRows returns the rows, the oldest first, and the value of changes.keys.
func readKeyRows(ctx context.Context, q querier) (rows []keyRow, revision int64, err error) {
	// The counter comes first: a change after it makes the next Refresh read the rows again.
	if err := q.QueryRowContext(ctx, "SELECT keys FROM changes").Scan(&revision); err != nil {
		return nil, 0, err
	}
	err = forEachRow(ctx, q, func(scan func(...any) error) error {
		var r keyRow
		if err := scan(&r.kid, (*[]byte)(&r.public), &r.created, &r.until); err != nil {
			return err
		}
		rows = append(rows, r)
		return nil
	}, "SELECT kid, public, created, until FROM keys ORDER BY created, kid")
	return rows, revision, err
}

// recordKeys completes the table of keys when a state directory is opened: keys of an
// agentctl that recorded none are recorded, of which the one with the greatest kid signed;
// and when the signing key has no file, a new one is made. The caller holds the write lock.
func recordKeys(d *stateDir, tx *sql.Tx, now time.Time) (made bool, err error) {
	if err := d.mkdir(keysDir); err != nil {
		return false, err
	}
	rows, _, err := readKeyRows(context.Background(), tx)
	if err != nil {
		return false, err
	}
	files, err := listKIDs(d)
	if err != nil {
		return false, err
	}
	if len(rows) == 0 && len(files) > 0 {
		return false, adoptKeys(d, tx, files, now)
	}
	for _, r := range rows {
		if r.until == 0 && slices.Contains(files, r.kid) {
			return false, nil
		}
	}
	kid, public, err := makeKey(d)
	if err != nil {
		return false, err
	}
	return true, replaceSigningKey(tx, kid, public, now)
}

// adoptKeys records the keys of an agentctl that did not record any.
func adoptKeys(d *stateDir, tx *sql.Tx, kids []string, now time.Time) error {
	if len(kids) > maxKeys {
		return fmt.Errorf("%s holds %d keys, at most %d are used; move the old ones away", keysDir, len(kids), maxKeys)
	}
	slices.Sort(kids) // a kid made here is a ULID, so kids sort by age
	for _, kid := range kids {
		key, err := readKey(d, keyFile(kid))
		if err == nil {
			err = replaceSigningKey(tx, kid, key.Public().(ed25519.PublicKey), now)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// replaceSigningKey records a key that signs from now on. The key before it verifies until
// every token that it signed has expired: those recorded, and those of boards and agents that
// were refreshed since, whose rows are replaced at each refresh.
func replaceSigningKey(tx *sql.Tx, kid string, public ed25519.PublicKey, now time.Time) error {
	until := now.Add(max(BoardTokenTTL, AgentTokenTTL)).Unix()
	for _, stmt := range []struct {
		sql  string
		args []any
	}{
		{"UPDATE keys SET until = max(?, (SELECT coalesce(max(exp), 0) FROM tokens)) + ? WHERE until = 0", []any{until, leewaySeconds}},
		{"INSERT INTO keys (kid, public, created, until) VALUES (?, ?, ?, 0)", []any{kid, []byte(public), now.Unix()}},
		{"UPDATE changes SET keys = keys + 1", nil},
	} {
		if _, err := tx.Exec(stmt.sql, stmt.args...); err != nil {
			return err
		}
	}
	return nil
}

// loadKeyring reads the keys and puts them in force. A key that is in force already stays the
// same object, and one that is recorded no more ends at once, also for identities that are
// cached or have a link or a stream.
func (s *Store) loadKeyring(ctx context.Context) error {
	s.keysMu.Lock()
	defer s.keysMu.Unlock()
	old := s.keyring.Load()
	ring, err := s.readKeyring(ctx, old)
	if errors.Is(err, fs.ErrNotExist) { // a rotation deleted a file after its row was read
		ring, err = s.readKeyring(ctx, old)
	}
	if err != nil {
		return err
	}
	s.keyring.Store(ring)
	if old == nil {
		return nil
	}
	for id, k := range old.public {
		if ring.public[id] != k {
			k.until.Store(keyDropped)
			s.keyDrops.Add(1)
		}
	}
	return nil
}

// readKeyring reads rows and files. It reuses the keys of the keyring before, if there is one.
func (s *Store) readKeyring(ctx context.Context, old *keyring) (*keyring, error) {
	rows, revision, err := readKeyRows(ctx, s.db.readDB)
	if err != nil {
		return nil, err
	}
	ring := &keyring{revision: revision, public: make(map[keyID]*verifyKey, len(rows))}
	for _, r := range rows {
		key, err := readKey(s.dir, keyFile(r.kid))
		switch {
		case r.until != 0 && errors.Is(err, fs.ErrNotExist):
			continue // taken away by an operator
		case err != nil:
			return nil, err
		case !r.public.Equal(key.Public()):
			return nil, fmt.Errorf("%s is not the key that is recorded under its name; restore it from a backup, or move it away (its tokens then stop working)", keyFile(r.kid))
		}
		id := keyID{s.relay.Issuer, r.kid}
		k := &verifyKey{public: r.public}
		if old != nil && old.public[id] != nil && old.public[id].public.Equal(r.public) {
			k = old.public[id]
		}
		k.until.Store(r.until)
		ring.public[id] = k
		session, err := deriveSessionKey(key)
		if err != nil {
			return nil, err
		}
		ring.sessions = append(ring.sessions, session)
		if r.until == 0 {
			ring.signKID, ring.signKey = r.kid, key
			last := len(ring.sessions) - 1
			ring.sessions[0], ring.sessions[last] = session, ring.sessions[0]
		}
	}
	if ring.signKey == nil {
		return nil, errors.New("no signing key is recorded; restart agentctl to make one")
	}
	return ring, nil
}

// sessionKeyInfo separates the keys of MCP sessions from whatever else is derived from a signing key.
const sessionKeyInfo = "agentctl-mcp-session-v1"

// deriveSessionKey derives the key of MCP session ids from a signing key (RFC 5869).
func deriveSessionKey(key ed25519.PrivateKey) ([]byte, error) {
	return hkdf.Key(sha256.New, key.Seed(), nil, sessionKeyInfo, sha256.Size)
}

// SessionKeys returns the keys of MCP session ids, one for each signing key, that of the present one
// first. They are derived and not stored: they are in a backup as the signing keys are, a rotation
// replaces them, and one that drops the old keys voids the sessions with the tokens. The caller
// must not change them.
func (s *Store) SessionKeys() [][]byte { return s.keyring.Load().sessions }

// refreshKeys reads the keys again if another process has changed them.
func (s *Store) refreshKeys(ctx context.Context, revision int64) error {
	if revision == s.keyring.Load().revision {
		return nil
	}
	if err := s.loadKeyring(ctx); err != nil {
		return err
	}
	s.log.Info("signing keys read again", zap.String("signing", s.keyring.Load().signKID))
	return nil
}

// lookupKey returns the key that a token names, nil for none. Right after a rotation by
// another process a token may have a key that Refresh has not read yet, so a kid that is not
// known is looked up in the database.
//
// Anybody can send tokens with a kid that does not exist. Lookups run one at a time, and one
// serves every caller that came before it began: a flood of such tokens costs one query of a
// single row after the other, and does not keep a new token from being accepted.
func (s *Store) lookupKey(issuer, kid string) *verifyKey {
	id := keyID{issuer, kid}
	if k := s.keyring.Load().public[id]; k != nil || issuer != s.relay.Issuer {
		return k
	}
	if s.db.watch.Stuck(storage.SlowAfter) != nil {
		return nil // a caller that waits for the disk here cannot be canceled
	}
	came := time.Now()
	timeout := time.NewTimer(storage.SlowAfter)
	defer timeout.Stop()
	select {
	case s.keyLookup.slot <- struct{}{}:
	case <-timeout.C:
		return nil
	}
	if s.keyLookup.began.After(came) {
		<-s.keyLookup.slot
		return s.keyring.Load().public[id]
	}
	s.keyLookup.began = time.Now()
	done := make(chan struct{})
	go func() { // holds the slot until the disk answers: one is stuck at most
		defer close(done)
		defer func() { <-s.keyLookup.slot }()
		op := s.db.watch.Begin("read")
		err := explain(s.dir.path, s.reloadKeyring())
		op.End(err)
		if err != nil && storage.Classify(err) == "" { // faults of the disk are logged by their monitor
			s.log.Warn("check for a new signing key", zap.Error(err))
		}
	}()
	select {
	case <-done:
	case <-timeout.C:
	}
	return s.keyring.Load().public[id]
}

// keyLookup is the state of lookupKey.
type keyLookup struct {
	slot  chan struct{} // holds one value during a lookup; taken before Store.keysMu
	began time.Time     // when the last lookup began; of the holder of slot
}

// reloadKeyring reads the keys if they have changed, within busyTimeout.
func (s *Store) reloadKeyring() error {
	ctx, cancel := context.WithTimeout(context.Background(), busyTimeout)
	defer cancel()
	var revision int64
	if err := s.db.readDB.QueryRowContext(ctx, "SELECT keys FROM changes").Scan(&revision); err != nil {
		return err
	}
	return s.refreshKeys(ctx, revision)
}

// signingKey returns the key that signs. revision is the value of changes.keys when the row
// of the token was written: a key that was replaced before that must not sign it, because it
// may end before the token does.
func (s *Store) signingKey(revision int64) (kid string, key ed25519.PrivateKey, err error) {
	if s.keyring.Load().revision < revision {
		ctx, cancel := context.WithTimeout(context.Background(), busyTimeout)
		defer cancel()
		if err := s.loadKeyring(ctx); err != nil {
			return "", nil, explain(s.dir.path, err)
		}
	}
	ring := s.keyring.Load()
	return ring.signKID, ring.signKey, nil
}

// warnOfUnrecordedKeys logs the files in keys/ that look like keys and are not used.
func (s *Store) warnOfUnrecordedKeys() {
	kids, err := listKIDs(s.dir)
	if err != nil {
		return // Open fails elsewhere if it matters
	}
	for _, kid := range kids {
		if s.keyring.Load().public[keyID{s.relay.Issuer, kid}] == nil {
			s.log.Warn("a file in keys/ is not a key of this relay and is not used; remove it, or see: agentctl keys ls", zap.String("file", keyFile(kid)))
		}
	}
}

// keyFile returns the name of a key's file. The kid was matched against kidRE.
func keyFile(kid string) string { return filepath.Join(keysDir, kid+".pem") }

// listKIDs returns the key ids that keys/ has files of; it ignores other files.
func listKIDs(d *stateDir) (kids []string, err error) {
	entries, err := fs.ReadDir(d.root.FS(), keysDir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if kid, ok := strings.CutSuffix(e.Name(), ".pem"); ok && kidRE.MatchString(kid) {
			kids = append(kids, kid)
		}
	}
	return kids, nil
}

// makeKey makes a signing key and its file. It is not a key of the relay before it is
// recorded. The caller holds the database's write lock.
func makeKey(d *stateDir) (kid string, public ed25519.PublicKey, err error) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", nil, err
	}
	kid = strings.ToLower(manifest.NewULID())
	return kid, public, d.replace(keyFile(kid), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

// readKey reads the file of one key, and narrows its mode.
func readKey(d *stateDir, name string) (ed25519.PrivateKey, error) {
	b, err := d.read(name, maxKeyFile)
	if err == nil {
		err = d.restrictMode(name)
	}
	if err != nil {
		return nil, err
	}
	if block, rest := pem.Decode(b); block != nil && block.Type == "PRIVATE KEY" && len(strings.TrimSpace(string(rest))) == 0 {
		if k, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
			if key, ok := k.(ed25519.PrivateKey); ok {
				return key, nil
			}
		}
	}
	return nil, fmt.Errorf("%s is not an Ed25519 private key in PKCS #8 PEM; restore it from a backup or move it away (its tokens then stop working)", name)
}
