package checkup

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"database/sql"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/go-json-experiment/json"
)

// maxKeyFile bounds a file with a key, bytes; that of the relay's authority has certificates too.
const maxKeyFile = 16 << 10

// checkKeys compares the files in keys/ with the table keys of relay.db, which says which of them are
// signing keys of this relay. A key needs both: a row without a file verifies nothing, and a file without a
// row is not used. A missing file of a key that no longer signs is only a warning: operators may remove it
// to void the tokens that it signed. An older agentctl recorded no keys, and then none are compared.
func (c *checker) checkKeys(ctx context.Context) (state, detail string) {
	files := c.list("keys/*.pem")
	if len(files) == 0 && !exists(c.path("relay.db")) {
		return Absent, ""
	}
	rows, err := c.readKeyRows(ctx)
	if err != nil { // checkDatabase has reported it
		return "", fmt.Sprintf("%d files; not compared, as relay.db could not be read", len(files))
	}
	recorded := map[string]bool{} // paths
	for _, r := range rows {
		name := filepath.Join("keys", r.kid+".pem")
		recorded[c.path(name)] = true
		switch public, err := readPublicKey(c.path(name)); {
		case errors.Is(err, fs.ErrNotExist):
			c.add(Problem{Store: "keys", Path: name, What: "a signing key of relay.db has no file: its tokens do not work", Repair: RepairRestore, Warning: !r.signs})
		case err != nil:
			c.fail("keys", name, err, RepairRestore)
		case !public.Equal(r.public):
			c.add(Problem{Store: "keys", Path: name, What: "it is not the key that relay.db has under this name", Repair: RepairRestore})
		}
	}
	for _, name := range files {
		if rows == nil || recorded[name] {
			continue
		}
		if _, err := readPublicKey(name); err == nil { // other files here belong to the stage sign
			c.add(Problem{Store: "keys", Path: name, What: "relay.db does not know this key, so no token is verified with it; remove it, unless a stage uses it", Warning: true})
		}
	}
	c.checkRecordCopy()
	return "", fmt.Sprintf("%d files, as relay.db has them", len(recorded))
}

// checkRecordCopy compares the copy of relay.json in keys/ with relay.json. The copy shows when somebody
// puts back an older relay.db together with its relay.json: it has a later epoch, unless keys/ was put
// back too. A relay of an older agentctl makes no copy, and one that is killed may leave a copy that is
// behind. The record of the event log is not kept up to date in the copy.
func (c *checker) checkRecordCopy() {
	name := filepath.Join("keys", "relay.json")
	problem := func(what string, isWarning bool) {
		c.add(Problem{Store: "keys", Path: name, What: what, Repair: RepairRestart, Warning: isWarning})
	}
	b, err := readSmall(c.path(name), maxRelayFile)
	if errors.Is(err, fs.ErrNotExist) || !c.record.found {
		return
	}
	var copied record
	if err == nil {
		err = json.Unmarshal(b, &copied)
	}
	if err != nil {
		problem("it is not the copy of relay.json that the relay writes: "+err.Error(), false)
		return
	}
	epoch, want := copied.Stores.RelayDB.Epoch, c.record.Stores.RelayDB.Epoch
	// Everything else must be equal.
	copied.found = true
	copied.Stores.RelayDB.Epoch = want
	copied.Stores.EventsDB = c.record.Stores.EventsDB
	switch {
	case copied != c.record || epoch > want:
		problem("it differs from relay.json", false)
	case epoch < want:
		problem("it is behind relay.json", true)
	}
}

// readPublicKey reads the file of a signing key and returns the key's public part. PKCS #8 stores the
// 32 bytes of the private key alone, and any 32 bytes are a valid key: damage only shows by another
// public key.
func readPublicKey(path string) (ed25519.PublicKey, error) {
	b, err := readSmall(path, maxKeyFile)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, errors.New("it is not a PEM file")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	private, ok := key.(ed25519.PrivateKey)
	if err != nil || !ok {
		return nil, errors.New("it is not an Ed25519 key")
	}
	return private.Public().(ed25519.PublicKey), nil
}

// keyRow is a row of the table keys.
type keyRow struct {
	kid    string
	public ed25519.PublicKey
	signs  bool // new tokens; others only verify
}

// readKeyRows returns the rows of the table keys. Without a relay.db the error is fs.ErrNotExist. It
// returns nil without an error for a database of an older agentctl, which has no such table.
func (c *checker) readKeyRows(ctx context.Context) (list []keyRow, err error) {
	if !exists(c.path("relay.db")) {
		return nil, fs.ErrNotExist
	}
	db, closeDB, err := openReadOnly(c.path("relay.db"))
	if err != nil {
		return nil, err
	}
	defer closeDB()
	if lacksTable(ctx, db, "keys") {
		return nil, nil
	}
	rows, err := db.QueryContext(ctx, "SELECT kid, public, until = 0 FROM keys")
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	list = []keyRow{}
	for rows.Next() {
		var r keyRow
		var public sql.RawBytes
		if err := rows.Scan(&r.kid, &public, &r.signs); err != nil {
			return nil, err
		}
		r.public = bytes.Clone(public)
		list = append(list, r)
	}
	return list, rows.Err()
}
