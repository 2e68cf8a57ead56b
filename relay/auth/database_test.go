package auth

import (
	"database/sql"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/manifest"
)

// A state directory of the first release opens: its nodes, tokens and keys are as they were.
func TestUpgrade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	d, err := openStateDir(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	db, err := openDatabase(d, false)
	if err != nil {
		t.Fatal(err)
	}
	node := manifest.NewNodeID()
	if _, err := db.writeDB.Exec(migrations[0] + `PRAGMA user_version = 1;
		INSERT INTO nodes (node_id, tenant, name, want, manifest, sum, created_ms, change) VALUES ('` + node + `', 'acme', 'attic', 'attic', '["m"]', x'00', 1, 7);
		INSERT INTO seen VALUES (1, 42);
		INSERT INTO tokens VALUES ('01HZX9K3M4P7Q8R9S0T1V2W3XY', 'device_runtime', 'acme', '` + node + `', '` + node + `', 'device:connect', 1, 4000000000);
		UPDATE changes SET nodes = 7, revocations = 3`); err != nil {
		t.Fatal(err)
	}
	if err := d.mkdir(keysDir); err != nil {
		t.Fatal(err)
	}
	kid, _, err := makeKey(d)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.replace(relayFile, []byte(`{"relay_id":"01HZX9K3M4P7Q8R9S0T1V2W3XY","audience":"agentctl:a","issuer":"agentctl:a","created":"2026-01-01T00:00:00Z"}`)); err != nil {
		t.Fatal(err)
	}
	if err := db.close(); err != nil {
		t.Fatal(err)
	}

	s := openStore(t, Options{StateDir: path})
	if s.keyring.Load().signKID != kid {
		t.Error("another key signs")
	}
	n, err := s.Node(t.Context(), "acme", "attic")
	if err != nil || n.NodeID != node || n.NameSet || len(n.Tags) != 0 || n.LastSeenMS != 42 || string(n.Manifest) != `["m"]` {
		t.Errorf("got %+v, %v", n, err)
	}
	if list, err := s.Tokens(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("got %+v, %v", list, err)
	}
	set(t, s, "acme", node, Attributes{Name: new("cellar"), AddTags: []string{"damp"}})
	if n, err := s.RemoveNode(t.Context(), "acme", node, false); err != nil || n != 1 {
		t.Errorf("removed with %d tokens, %v", n, err)
	}
	var version int
	if err := s.db.readDB.QueryRow("PRAGMA user_version").Scan(&version); err != nil || version != len(migrations) {
		t.Errorf("schema %d, %v", version, err)
	}
}

// Each table of what belongs to a row of nodes is cleared when the node is removed: the row's
// id is used again.
func TestRemovalCoversAllTables(t *testing.T) {
	s := openStore(t, Options{})
	id := manifest.NewNodeID()
	upsert(t, s, "acme", id, "pi", "")
	set(t, s, "acme", id, Attributes{AddTags: []string{"roof"}})
	var tables []string
	err := forEachRow(t.Context(), s.db.readDB, func(scan func(...any) error) error {
		var name string
		err := scan(&name)
		tables = append(tables, name)
		return err
	}, "SELECT m.name FROM sqlite_master m WHERE m.type = 'table' AND EXISTS (SELECT 1 FROM pragma_table_info(m.name) WHERE name = 'id' AND pk = 1)")
	if err != nil {
		t.Fatal(err)
	}
	err = s.db.write(t.Context(), func(tx *sql.Tx) error {
		_, err := tx.Exec("INSERT OR REPLACE INTO served (id, boot_id, clone_ms) VALUES (1, 'x', 1)")
		return err
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.RemoveNode(t.Context(), "acme", id, false); err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		if table == "changes" || table == "relay" { // one row
			continue
		}
		var n int
		if err := s.db.readDB.QueryRow("SELECT count(*) FROM " + table).Scan(&n); err != nil || n != 0 {
			t.Errorf("%s: %d rows are left, %v", table, n, err)
		}
	}
	if !strings.Contains(strings.Join(tables, " "), "served") {
		t.Errorf("tables %v", tables)
	}
}
