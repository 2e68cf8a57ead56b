package checkup

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
	"agentctl/relay/auth"
	"agentctl/sqlitefile"
)

// record is what relay.json says about the stores.
type record struct {
	found    bool
	RelayID  string `json:"relay_id"`
	Audience string `json:"audience"`
	Issuer   string `json:"issuer"`
	Created  string `json:"created"`
	Stores   struct {
		RelayDB struct {
			ID    string `json:"id"`
			Epoch int64  `json:"epoch"`
		} `json:"relay_db"`
		EventsDB struct {
			ID      string `json:"id"`
			LastSeq uint64 `json:"last_seq"`
		} `json:"events_db"`
	} `json:"stores"`
}

const maxRelayFile = 4 << 10 // bytes

func (c *checker) checkRelayFile(context.Context) (state, detail string) {
	b, err := readSmall(c.path("relay.json"), maxRelayFile)
	if errors.Is(err, fs.ErrNotExist) && !exists(c.path("relay.db")) {
		c.add(Problem{Store: "relay.json", Path: "relay.json", What: "there is no relay.json and no relay.db: no relay has run here; name its directory with --state-dir"})
		return Absent, ""
	}
	if err != nil {
		c.fail("relay.json", "relay.json", err, RepairRestart)
		return "", ""
	}
	if err := json.Unmarshal(b, &c.record); err != nil {
		c.record = record{}
		c.add(Problem{Store: "relay.json", Path: "relay.json", What: "not the JSON that the relay writes: " + err.Error(), Repair: RepairRestart})
		return "", ""
	}
	if _, ok := manifest.ParseULID(c.record.RelayID); !ok {
		c.add(Problem{Store: "relay.json", Path: "relay.json", Where: "relay_id", What: "not a relay id", Repair: RepairRestart})
		return "", ""
	}
	c.record.found = true
	return "", "relay " + c.record.RelayID
}

// openReadOnly returns a connection that changes nothing.
func openReadOnly(path string) (*sql.DB, func(), error) {
	dsn, done, err := sqlitefile.ReadOnly(path, "_busy_timeout=5000")
	if err != nil {
		return nil, nil, err
	}
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, nil, errors.Join(err, done())
	}
	db.SetMaxOpenConns(1)
	return db, func() { _ = errors.Join(db.Close(), done()) }, nil // only read
}

// checkFile checks what every SQLite database has. ok means that its content can be read.
func (c *checker) checkFile(ctx context.Context, name string, recorded bool, repair Repair) (ok bool) {
	path := c.path(name)
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !recorded && !exists(path+"-wal"):
		return false
	case err == nil && info.Size() > 0 && info.Mode().IsRegular():
	case err == nil && info.Mode().IsRegular():
		c.add(Problem{Store: name, Path: name, What: "it is empty", Repair: RepairRestore})
		return false
	case errors.Is(err, fs.ErrNotExist):
		c.add(Problem{Store: name, Path: name, What: "it is missing", Repair: RepairRestore})
		return false
	case err == nil:
		c.add(Problem{Store: name, Path: name, What: "it is not a regular file; move it away"})
		return false
	default:
		c.fail(name, name, err, RepairNone)
		return false
	}
	err = sqlitefile.ScanWAL(path)
	if damage, isDamage := errors.AsType[*sqlitefile.WALDamage](err); isDamage {
		c.add(Problem{Store: name, Path: damage.Path, Where: fmt.Sprintf("frame %d, byte %d", damage.Frame, damage.Offset), What: damage.Error(), Repair: repair})
	} else if err != nil {
		c.fail(name, name, err, repair)
		return false
	}
	if err := c.integrity(ctx, name, repair); err != nil {
		c.fail(name, name, fmt.Errorf("it cannot be read: %w", err), repair)
		return false
	}
	return true
}

// integrity runs SQLite's own check, and looks at what that leaves out: the file's length and pages
// that are not used.
func (c *checker) integrity(ctx context.Context, name string, repair Repair) error {
	db, done, err := openReadOnly(c.path(name))
	if err != nil {
		return err
	}
	defer done()
	rows, err := db.QueryContext(ctx, fmt.Sprintf("PRAGMA integrity_check(%d)", maxProblems))
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			return err
		}
		if line != "ok" {
			c.add(Problem{Store: name, Path: name, What: line, Repair: repair})
		}
	}
	return rows.Err()
}

// checkDatabase checks relay.db and that it is the one of relay.json.
func (c *checker) checkDatabase(ctx context.Context) (state, detail string) {
	if !exists(c.path("relay.db")) && !c.record.found && c.count["relay.json"] > 0 && !exists(c.path("keys")) {
		return Absent, ""
	}
	if !c.checkFile(ctx, "relay.db", true, RepairRestore) {
		return "", ""
	}
	db, done, err := openReadOnly(c.path("relay.db"))
	if err != nil {
		c.fail("relay.db", "relay.db", err, RepairRestore)
		return "", ""
	}
	defer done()
	if err := c.checkOwnRecord(ctx); err != nil {
		c.fail("relay.db", "relay.db", err, RepairRestore)
	}
	rows, err := c.checkRows(ctx, db)
	if err != nil {
		c.fail("relay.db", "relay.db", err, RepairRestore)
	}
	return "", fmt.Sprintf("pages, write-ahead log, %d rows, and that relay.json and its copy name it", rows)
}

// checkOwnRecord compares relay.db with relay.json and its copy in keys/. Files that are behind are no
// problem: they are written after relay.db.
func (c *checker) checkOwnRecord(ctx context.Context) error {
	is, err := auth.ReadDatabase(ctx, c.dir)
	if err == nil {
		err = auth.CheckRecord(c.dir, is)
	}
	if err == nil && c.record.found && is.RelayID != "" && is.Audience != c.record.Audience {
		c.add(Problem{Store: "relay.db", Path: "relay.json", Where: "audience", What: fmt.Sprintf("it is %q, and relay.db has %q: tokens would be refused; move relay.json away, it is made anew from relay.db", c.record.Audience, is.Audience)})
	}
	return err
}

func hasNoTable(ctx context.Context, db *sql.DB, name string) bool {
	var n int
	err := db.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?", name).Scan(&n)
	return err == nil && n == 0
}

// checkRows looks at values whose form is known: SQLite's check does not notice a changed text. The
// manifest of a board has a checksum. It returns the number of rows.
func (c *checker) checkRows(ctx context.Context, db *sql.DB) (n int, err error) {
	for _, q := range []struct {
		table, query string
		ok           func(v [][]byte) bool
	}{
		{"tokens", "SELECT jti, scopes, class, iat <= exp FROM tokens", func(v [][]byte) bool {
			_, isULID := manifest.ParseULID(string(v[0]))
			return isULID && isText(v[1]) && isText(v[2]) && len(v[2]) > 0 && string(v[3]) == "1"
		}},
		{"revocations", "SELECT kind, value, at > 0 AND until >= 0 FROM revocations", func(v [][]byte) bool {
			return isText(v[0]) && isText(v[1]) && len(v[1]) > 0 && string(v[2]) == "1"
		}},
		{"nodes", "SELECT node_id, manifest, sum, name, tenant FROM nodes", func(v [][]byte) bool {
			sum := sha256.Sum256(v[1])
			return isText(v[3]) && isText(v[4]) && (len(v[1]) == 0 || jsontext.Value(v[1]).IsValid() && (len(v[2]) != len(sum) || string(v[2]) == string(sum[:])))
		}},
		{"invites", "SELECT code, prefix, used <= uses, expires >= created FROM invites", func(v [][]byte) bool {
			return isText(v[0]) && isText(v[1]) && string(v[2]) == "1" && string(v[3]) == "1"
		}},
		{"enrollments", "SELECT jkt, public_key, sub, tenant FROM enrollments", func(v [][]byte) bool {
			return isText(v[0]) && len(v[1]) == 32 && isText(v[2]) && isText(v[3])
		}},
	} {
		if hasNoTable(ctx, db, q.table) {
			continue
		}
		k, err := c.checkTable(ctx, db, q.table, q.query, q.ok)
		if n += k; err != nil {
			return n, err
		}
	}
	return n, nil
}

func (c *checker) checkTable(ctx context.Context, db *sql.DB, table, query string, ok func([][]byte) bool) (n int, err error) {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return 0, err
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		return 0, err
	}
	values := make([][]byte, len(columns))
	to := make([]any, len(columns))
	for i := range values {
		to[i] = &values[i]
	}
	for rows.Next() {
		if err := rows.Scan(to...); err != nil {
			return n, err
		}
		if n++; !ok(values) {
			c.add(Problem{Store: "relay.db", Path: "relay.db", Where: fmt.Sprintf("table %s, row %d", table, n), What: "a value is not of the form that the relay writes", Repair: RepairRestore})
		}
	}
	return n, rows.Err()
}

// isText reports whether b is printable text, as identities are.
func isText(b []byte) bool {
	for _, r := range string(b) {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return false
		}
	}
	return true
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
