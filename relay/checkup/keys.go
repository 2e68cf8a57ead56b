package checkup

import (
	"bytes"
	"context"
	"crypto"
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

const maxKeyFile = 16 << 10 // bytes

// checkKeys compares the files in keys/ with the table keys of relay.db. Other files there are
// those of the stage sign.
func (c *checker) checkKeys(ctx context.Context) (state, detail string) {
	files := c.list("keys/*.pem")
	if len(files) == 0 && !exists(c.path("relay.db")) {
		return Absent, ""
	}
	rows, err := c.readKeys(ctx)
	if err != nil {
		return "", fmt.Sprintf("%d files; not compared, as relay.db could not be read", len(files)) // a problem of relay.db
	}
	recorded := map[string]bool{}
	for _, r := range rows {
		name := filepath.Join("keys", r.kid+".pem")
		recorded[c.path(name)] = true
		switch key, err := readKey(c.path(name)); {
		case errors.Is(err, fs.ErrNotExist):
			c.add(Problem{Store: "keys", Path: name, What: "a signing key of relay.db has no file: its tokens do not work", Repair: RepairRestore, Warning: !r.signs})
		case err != nil:
			c.fail("keys", name, err, RepairRestore)
		case !key.Equal(r.public):
			c.add(Problem{Store: "keys", Path: name, What: "it is not the key that relay.db has under this name", Repair: RepairRestore})
		}
	}
	for _, name := range files {
		if _, err := readKey(name); err == nil && rows != nil && !recorded[name] {
			c.add(Problem{Store: "keys", Path: name, What: "relay.db does not know this key, so no token is verified with it; remove it, unless a stage uses it", Warning: true})
		}
	}
	c.checkRecordCopy()
	return "", fmt.Sprintf("%d files, as relay.db has them", len(recorded))
}

// checkRecordCopy compares the copy of relay.json in keys/ with relay.json. An older agentctl makes
// none, and a kill may leave one that is behind.
func (c *checker) checkRecordCopy() {
	name := filepath.Join("keys", "relay.json")
	problem := func(what string, warning bool) {
		c.add(Problem{Store: "keys", Path: name, What: what, Repair: RepairRestart, Warning: warning})
	}
	var copied, own record
	b, err := readSmall(c.path(name), maxRelayFile)
	if errors.Is(err, fs.ErrNotExist) || !c.record.found {
		return
	}
	if err == nil {
		err = json.Unmarshal(b, &copied)
	}
	if err != nil {
		problem("it is not the copy of relay.json that the relay writes: "+err.Error(), false)
		return
	}
	own, copied.found = c.record, true
	own.Stores.EventsDB = copied.Stores.EventsDB
	is, want := copied.Stores.RelayDB.Epoch, own.Stores.RelayDB.Epoch
	copied.Stores.RelayDB.Epoch = want
	switch {
	case copied != own || is > want:
		problem("it differs from relay.json", false)
	case is < want:
		problem("it is behind relay.json", true)
	}
}

// readKey reads the public part of a signing key.
func readKey(path string) (ed25519.PublicKey, error) {
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
	// PKCS #8 has the seed alone: every seed is a key, so damage shows by the public key only.
	return private.Public().(ed25519.PublicKey), nil
}

type keyRow struct {
	kid    string
	public ed25519.PublicKey
	signs  bool
}

// readKeys returns the rows of the table keys; nil without an error for a database that has none.
func (c *checker) readKeys(ctx context.Context) (list []keyRow, err error) {
	if c.count["relay.db"] > 0 && !exists(c.path("relay.db")) {
		return nil, fs.ErrNotExist
	}
	db, done, err := openReadOnly(c.path("relay.db"))
	if err != nil {
		return nil, err
	}
	defer done()
	if hasNoTable(ctx, db, "keys") {
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

// checkAuthority checks the relay's own authority and its server certificate.
func (c *checker) checkAuthority(context.Context) (state, detail string) {
	authority, err := readPair(c.path("authority.pem"))
	if errors.Is(err, fs.ErrNotExist) {
		if exists(c.path("server.pem")) {
			c.add(Problem{Store: "authority", Path: "authority.pem", What: "it is missing, and server.pem was signed by it: boards that know this relay by its authority would refuse a new one", Repair: RepairRestore})
			return "", ""
		}
		return Absent, ""
	} else if err != nil {
		c.fail("authority", "authority.pem", err, RepairRestore)
		return "", ""
	}
	if err := authority.CheckSignatureFrom(authority); err != nil {
		c.fail("authority", "authority.pem", fmt.Errorf("its certificate is not that of an authority: %w", err), RepairRestore)
		return "", ""
	}
	server, err := readPair(c.path("server.pem"))
	if err == nil {
		err = server.CheckSignatureFrom(authority)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.fail("authority", "server.pem", err, RepairRestart)
	}
	return "", "authority and server certificate, with their keys"
}

// readPair reads a file with a private key and its certificate.
func readPair(path string) (*x509.Certificate, error) {
	b, err := readSmall(path, maxKeyFile)
	if err != nil {
		return nil, err
	}
	var key any
	var cert *x509.Certificate
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		switch block.Type {
		case "CERTIFICATE":
			if cert == nil {
				if cert, err = x509.ParseCertificate(block.Bytes); err != nil {
					return nil, err
				}
			}
		case "PRIVATE KEY":
			if key, err = x509.ParsePKCS8PrivateKey(block.Bytes); err != nil {
				return nil, err
			}
		case "EC PRIVATE KEY":
			if key, err = x509.ParseECPrivateKey(block.Bytes); err != nil {
				return nil, err
			}
		}
	}
	if cert == nil || key == nil {
		return nil, errors.New("it lacks a private key or a certificate")
	}
	signer, ok := key.(interface{ Public() crypto.PublicKey })
	if !ok {
		return nil, errors.New("it has no key that signs")
	}
	if public, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(cert.PublicKey) {
		return nil, errors.New("its key is not that of its certificate")
	}
	return cert, nil
}
