package eventlog

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"unsafe"

	"agentctl/relay/kernel"
)

// Words are texts that many rows of calls share: a row refers to two words of its chain. Those of the
// chain's present epoch are in memory, its dictionary. When the dictionary is full, the epoch ends, and the
// next one begins with an empty dictionary. An epoch is the seq of its first row; rows from there on use
// words of this epoch or of later ones only. So when the mark of the chain has reached the epoch of newer
// words, no row uses older ones, and removeWords deletes them without counting uses. The price is that
// texts that are still common are stored again in each epoch.

// Bounds of what a writer has in memory and of the chains of a log.
const (
	maxChains     = 16_384 // tenants times classes that have events
	maxChainWords = 2_048  // words of a chain's epoch
	maxWords      = 32_768 // words of all chains in memory
)

// errTooManyChains says that an event of a new tenant has no place.
var errTooManyChains = fmt.Errorf("eventlog: more than %d tenants and classes have events", maxChains)

// Columns of the tables state and calls.
const stateColumns, callColumns = 7, 8

// insertRows are the numbers of rows that one statement inserts, descending: a statement costs
// as much as a few rows.
var insertRows = [...]int{16, 4, 1}

// writer writes rows of both classes, with their chains and words. It belongs to one goroutine:
// that of Run, of a migration or of a salvage. Its caller begins and ends the transactions, and
// calls forget after one that failed.
//
// add changes the chains in memory at once. updateChains writes those that changed after the rows of the
// batch, so the triggers compare each row with its chain as it was before the batch.
type writer struct {
	conn  *sql.Conn
	logID string
	hash  hasher

	chains    map[chainKey]*chain // nil: to be read again
	maxChains int
	byID      map[int64]*chain
	changed   []*chain // to be written by updateChains
	words     int      // in memory, of all chains

	grownState, grownCalls int64 // bytes that the newest insert added to the chains

	// The mark that new chains get: rows below it are gone. A migration and a salvage take it from the old
	// log; otherwise it is 0.
	newMark   uint64
	nextChain int64
	nextWord  int64

	statements                           []io.Closer
	insertState, insertCalls             [len(insertRows)]*sql.Stmt
	insertChain, updateChain, insertWord *sql.Stmt
	stateArgs, callArgs                  []any
	blobs                                []byte // hashes and trace ids of one batch
}

// newLogID returns a random id for a new log.
func newLogID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // does not fail
	return hex.EncodeToString(id[:])
}

// isLogID reports whether s can be the id of a log.
func isLogID(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == 16
}

// createTables makes the tables of a new log. oldLast is the last seq of the log that it
// continues, 0 without one.
func createTables(ctx context.Context, conn *sql.Conn, id string, oldLast uint64) error {
	_, err := conn.ExecContext(ctx, schema+fmt.Sprintf("INSERT INTO log (id, name, last) VALUES (1, '%s', %d); PRAGMA application_id = %d", id, oldLast, applicationID))
	return err
}

// newWriter prepares the statements and reads the chains. After the first error, prepare does nothing, so
// that the error is checked once.
func newWriter(ctx context.Context, conn *sql.Conn) (_ *writer, err error) {
	w := &writer{conn: conn, maxChains: maxChains}
	defer func() {
		if err != nil {
			_ = w.Close()
		}
	}()
	prepare := func(query string) (stmt *sql.Stmt) {
		if err != nil {
			return nil
		}
		if stmt, err = conn.PrepareContext(ctx, query); err == nil {
			w.statements = append(w.statements, stmt)
		}
		return stmt
	}
	rows := func(n, columns int) string {
		row := "(?" + strings.Repeat(", ?", columns-1) + ")"
		return row + strings.Repeat(", "+row, n-1)
	}
	for i, n := range insertRows {
		w.insertState[i] = prepare("INSERT INTO state (seq, chain, type, aggregate_id, payload, created_at, hash) VALUES " + rows(n, stateColumns))
		w.insertCalls[i] = prepare("INSERT INTO calls (seq, chain, kind, actor, trace, rest, created_at, hash) VALUES " + rows(n, callColumns))
	}
	w.insertChain = prepare("INSERT INTO chains (id, tenant, class, mark, anchor, last, head, rows, bytes) VALUES (?, ?, ?, ?, ?, 0, ?, 0, 0)")
	w.updateChain = prepare("UPDATE chains SET mark = ?, anchor = ?, last = ?, head = ?, rows = ?, bytes = ? WHERE id = ?")
	w.insertWord = prepare("INSERT INTO words (id, chain, epoch, type, aggregate_id, text) VALUES (?, ?, ?, ?, ?, ?)")
	if err == nil {
		err = conn.QueryRowContext(ctx, "SELECT name FROM log").Scan(&w.logID)
	}
	if err == nil {
		err = w.load(ctx)
	}
	return w, err
}

// Close closes the statements; the connection is the caller's.
func (w *writer) Close() (err error) {
	for _, s := range w.statements {
		err = errors.Join(err, s.Close())
	}
	return err
}

// load reads the chains. Words are read when a chain needs them.
func (w *writer) load(ctx context.Context) error {
	if err := w.conn.QueryRowContext(ctx, "SELECT coalesce(max(id), 0) + 1, (SELECT coalesce(max(id), 0) + 1 FROM words) FROM chains").Scan(&w.nextChain, &w.nextWord); err != nil {
		return err
	}
	list, err := readChains(ctx, w.conn)
	if err != nil {
		return err
	}
	w.chains, w.byID = make(map[chainKey]*chain, len(list)), make(map[int64]*chain, len(list))
	w.changed, w.words = w.changed[:0], 0
	for _, c := range list {
		w.chains[chainKey{c.tenant, c.class}], w.byID[c.id] = c, c
	}
	return nil
}

// queryer is a *sql.DB, *sql.Conn or *sql.Tx.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// readChains reads the table chains, in the order of ids.
func readChains(ctx context.Context, db queryer) (list []*chain, err error) {
	rows, err := db.QueryContext(ctx, "SELECT id, tenant, class, mark, anchor, last, head, rows, bytes FROM chains ORDER BY id")
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var c chain
		var anchor, head []byte
		if err := rows.Scan(&c.id, &c.tenant, &c.class, &c.mark, &anchor, &c.last, &head, &c.rows, &c.bytes); err != nil {
			return nil, err
		}
		if len(anchor) != hashSize || len(head) != hashSize {
			return nil, fmt.Errorf("%w: chain %d has no hashes", ErrDamaged, c.id)
		}
		c.anchor, c.head = rowHash(anchor), rowHash(head)
		list = append(list, &c)
	}
	return list, rows.Err()
}

// forget drops what is in memory, after a transaction that failed. The next insert, or the next check of
// retention, reads it again from the disk, which may have kept the transaction or not.
func (w *writer) forget() { w.chains = nil }

// insert inserts events whose Seq and CreatedMS are set, in ascending order, and updates their
// chains. It runs inside a transaction. Each statement inserts up to 16 rows (insertRows); words, which
// are rare, are inserted one at a time before their row.
func (w *writer) insert(ctx context.Context, events []kernel.Event) error {
	if w.chains == nil {
		if err := w.load(ctx); err != nil {
			return err
		}
	}
	// Space for a hash and a trace id of each event, so that blob does not allocate.
	if need := len(events) * 2 * hashSize; cap(w.blobs) < need {
		w.blobs = make([]byte, 0, need)
	}
	w.stateArgs, w.callArgs, w.blobs = w.stateArgs[:0], w.callArgs[:0], w.blobs[:0]
	w.grownState, w.grownCalls = 0, 0
	for i := range events {
		if err := w.add(ctx, &events[i]); err != nil {
			return err
		}
	}
	if err := flush(ctx, &w.insertState, w.stateArgs, stateColumns); err != nil {
		return err
	}
	if err := flush(ctx, &w.insertCalls, w.callArgs, callColumns); err != nil {
		return err
	}
	return w.updateChains(ctx)
}

// add computes the row of an event and appends its columns to the arguments of the table's INSERT. It
// inserts the words that the row needs first, and advances the chain.
func (w *writer) add(ctx context.Context, e *kernel.Event) error {
	class := classOf(e.Type)
	c, err := w.chain(ctx, e.Tenant, class)
	if err != nil {
		return err
	}
	// The bytes are not changed until the next insert, and the driver copies them.
	payload, before := unsafe.String(unsafe.SliceData(e.Payload), len(e.Payload)), c.bytes
	if class == ClassState {
		c.bytes += stateBytes(e)
		w.grownState += c.bytes - before
	} else {
		r := splitCall(payload)
		kind, err := w.word(ctx, c, e.Seq, word{e.Type, e.Aggregate, r.kind})
		if err != nil {
			return err
		}
		actor, err := w.word(ctx, c, e.Seq, word{text: r.actor})
		if err != nil {
			return err
		}
		trace := w.blobs[len(w.blobs):]
		if r.hasTrace {
			trace = w.blob(r.trace)
		}
		c.bytes += r.bytes()
		w.grownCalls += c.bytes - before
		w.callArgs = append(w.callArgs, int64(e.Seq), c.id, kind, actor, trace, r.rest, e.CreatedMS, nil) // the hash follows
	}
	c.head = w.hash.next(c.head, e)
	c.last = e.Seq
	c.rows++
	w.markChanged(c)
	hash := w.blob(c.head)
	if class == ClassState {
		w.stateArgs = append(w.stateArgs, int64(e.Seq), c.id, e.Type, e.Aggregate, payload, e.CreatedMS, hash)
	} else {
		w.callArgs[len(w.callArgs)-1] = hash
	}
	return nil
}

// blob returns a copy of b that lasts until the next insert.
func (w *writer) blob(b [hashSize]byte) []byte {
	n := len(w.blobs)
	w.blobs = append(w.blobs, b[:]...)
	return w.blobs[n:len(w.blobs):len(w.blobs)]
}

// flush inserts rows, as many at a time as there are statements for.
func flush(ctx context.Context, statements *[len(insertRows)]*sql.Stmt, args []any, columns int) error {
	for i, n := range insertRows {
		for ; len(args) >= n*columns; args = args[n*columns:] {
			if _, err := statements[i].ExecContext(ctx, args[:n*columns]...); err != nil {
				return err
			}
		}
	}
	return nil
}

// updateChains writes the chains that changed.
func (w *writer) updateChains(ctx context.Context) error {
	for _, c := range w.changed {
		if _, err := w.updateChain.ExecContext(ctx, int64(c.mark), c.anchor[:], int64(c.last), c.head[:], c.rows, c.bytes, c.id); err != nil {
			return err
		}
		c.changed = false
	}
	w.changed = w.changed[:0]
	return nil
}

// markChanged notes that a chain is to be written.
func (w *writer) markChanged(c *chain) {
	if !c.changed {
		c.changed = true
		w.changed = append(w.changed, c)
	}
}

// chain returns the chain of a tenant and class, and makes it if there is none: without rows, with the
// mark newMark, and with its start as the hash before the first row.
func (w *writer) chain(ctx context.Context, tenant string, class Class) (*chain, error) {
	key := chainKey{tenant, class}
	if c := w.chains[key]; c != nil {
		return c, nil
	}
	if len(w.chains) >= w.maxChains {
		if err := w.dropEmptyChains(ctx); err != nil {
			return nil, err
		}
	}
	start := chainStart(w.logID, tenant, class)
	c := &chain{id: w.nextChain, tenant: strings.Clone(tenant), class: class, mark: w.newMark, anchor: start, head: start, bytes: chainOverhead}
	if _, err := w.insertChain.ExecContext(ctx, c.id, c.tenant, string(class), int64(c.mark), start[:], start[:]); err != nil {
		return nil, err
	}
	w.nextChain++
	w.chains[chainKey{c.tenant, class}], w.byID[c.id] = c, c
	return c, nil
}

// dropEmptyChains deletes the chains of tenants whose events are all gone. log.last remembers
// the newest of them: their numbers must not be given again, and CanResume needs it. It is called when
// maxChains is reached and not before, since a tenant that comes back continues its chain. Chains that
// this transaction has made (last is 0) stay, because they are about to get rows.
func (w *writer) dropEmptyChains(ctx context.Context) error {
	var last uint64
	dropped := 0
	for key, c := range w.chains {
		if !c.isEmpty() || c.last == 0 {
			continue
		}
		last = max(last, c.last)
		dropped++
		delete(w.chains, key)
		delete(w.byID, c.id)
		w.words -= len(c.words)
	}
	if dropped == 0 {
		return errTooManyChains
	}
	for _, q := range []string{
		fmt.Sprintf("UPDATE log SET last = max(last, %d)", last),
		"DELETE FROM words WHERE chain IN (SELECT id FROM chains WHERE mark > last)",
		"DELETE FROM chains WHERE mark > last",
	} {
		if _, err := w.conn.ExecContext(ctx, q); err != nil {
			return err
		}
	}
	return nil
}

// word returns the id of a text that rows of a chain share; seq is that of the row.
func (w *writer) word(ctx context.Context, c *chain, seq uint64, key word) (id int64, err error) {
	if c.words == nil {
		if err := w.readWords(ctx, c); err != nil {
			return 0, err
		}
	}
	if id, ok := c.words[key]; ok {
		return id, nil
	}
	if c.epoch == 0 || len(c.words) >= maxChainWords {
		w.words -= len(c.words)
		// This row may use words of both epochs, so the words of the old one stay for as
		// long as it does.
		c.epoch = seq + 1
		clear(c.words)
	}
	if w.words >= maxWords {
		w.dropWords(c)
	}
	key = word{strings.Clone(key.eventType), strings.Clone(key.aggregate), strings.Clone(key.text)}
	id = w.nextWord
	if _, err := w.insertWord.ExecContext(ctx, id, c.id, int64(c.epoch), key.eventType, key.aggregate, key.text); err != nil {
		return 0, err
	}
	w.nextWord++
	w.words++
	c.words[key] = id
	c.bytes += key.bytes()
	return id, nil
}

// dropWords removes the words of all other chains from memory; a chain reads its words again for its next
// row. Dropping only the words that were used least would need an order of use, which each call updates.
func (w *writer) dropWords(c *chain) {
	for _, other := range w.chains {
		if other != c {
			other.words = nil
		}
	}
	w.words = len(c.words)
}

// readWords reads the words of a chain's newest epoch.
func (w *writer) readWords(ctx context.Context, c *chain) error {
	rows, err := w.conn.QueryContext(ctx, "SELECT id, epoch, type, aggregate_id, text FROM words WHERE chain = ? AND epoch = (SELECT max(epoch) FROM words WHERE chain = ?)", c.id, c.id)
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	words := make(map[word]int64)
	for rows.Next() {
		var id int64
		var k word
		if err := rows.Scan(&id, &c.epoch, &k.eventType, &k.aggregate, &k.text); err != nil {
			return err
		}
		words[k] = id
	}
	if err := rows.Err(); err != nil {
		return err
	}
	c.words = words
	if w.words += len(words); w.words > maxWords {
		w.dropWords(c)
	}
	return nil
}

// removeWords deletes the words of a chain that no row uses any more: those of all epochs below the newest
// one that the mark has reached, or all if the chain is empty. It subtracts their bytes from the chain.
func (w *writer) removeWords(ctx context.Context, c *chain) error {
	if c.class != ClassCalls {
		return nil
	}
	const unused = " FROM words WHERE chain = ? AND epoch < ?"
	below := int64(math.MaxInt64)
	if c.isEmpty() {
		w.words -= len(c.words)
		c.words, c.epoch = nil, 0
	} else if err := w.conn.QueryRowContext(ctx, "SELECT coalesce(max(epoch), 0) FROM words WHERE chain = ? AND epoch <= ?", c.id, int64(c.mark)).Scan(&below); err != nil {
		return err
	}
	var bytes int64
	err := w.conn.QueryRowContext(ctx, fmt.Sprintf("SELECT coalesce(sum(%d + octet_length(type) + octet_length(aggregate_id) + octet_length(text)), 0)", wordOverhead)+unused, c.id, below).Scan(&bytes)
	if err != nil || bytes == 0 {
		return err
	}
	c.bytes -= bytes
	w.markChanged(c)
	_, err = w.conn.ExecContext(ctx, "DELETE"+unused, c.id, below)
	return err
}
