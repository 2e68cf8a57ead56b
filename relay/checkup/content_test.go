package checkup

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/sqlitefile"
)

// sameContent reports whether two versions of a file of a state directory mean the same to a relay: a
// damage that changes only unused bytes, such as those of a free page, is no damage.
func sameContent(t testing.TB, name string, a, b []byte) bool {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	switch filepath.Ext(name) {
	case ".pem":
		text := certificateText
		if filepath.Dir(name) == "keys" {
			text = keyText
		}
		return text(write("a", a)) == text(write("b", b))
	case ".json":
		return isSameOrBehind(a, b)
	case ".db":
		return dump(t, write("a.db", a)) == dump(t, write("b.db", b))
	}
	return false
}

// certificateText is what a relay uses of a file with a key and a certificate. The copy of the public
// key beside the private one is not read.
func certificateText(path string) string {
	cert, err := readCertificate(path)
	if err != nil {
		return err.Error()
	}
	return string(cert.Raw)
}

// keyText is what a relay uses of the file of a signing key.
func keyText(path string) string {
	key, err := readPublicKey(path)
	return fmt.Sprint(key, err)
}

// isSameOrBehind reports whether relay.json still names the relay and its stores. Counters that are
// behind those of the stores, and ids that are missing, are written again at the next start.
func isSameOrBehind(sound, damaged []byte) bool {
	var was, is record
	if json.Unmarshal(sound, &was) != nil || json.Unmarshal(damaged, &is) != nil {
		return false
	}
	sameID := func(was, is string) bool { return is == was || is == "" }
	db, events := is.Stores.RelayDB, is.Stores.EventsDB
	return is.RelayID == was.RelayID && is.Audience == was.Audience &&
		sameID(was.Stores.RelayDB.ID, db.ID) && db.Epoch <= was.Stores.RelayDB.Epoch &&
		sameID(was.Stores.EventsDB.ID, events.ID) && events.LastSeq <= was.Stores.EventsDB.LastSeq
}

// dump is the schema and every row of every table of a database, or the errors in their place.
func dump(t testing.TB, path string) string {
	t.Helper()
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, "mode=ro&immutable=1"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var out strings.Builder
	for _, query := range []string{"PRAGMA user_version", "PRAGMA application_id"} {
		out.WriteString(strings.Join(queryRows(db, query)[0], " "))
	}
	for _, object := range queryRows(db, "SELECT name, sql FROM sqlite_schema ORDER BY name") {
		out.WriteString(strings.Join(object, " "))
		if len(object) == 2 && strings.HasPrefix(object[1], "CREATE TABLE") {
			for _, row := range queryRows(db, "SELECT * FROM "+object[0]) {
				out.WriteString(strings.Join(row, "|") + "\n")
			}
		}
	}
	return out.String()
}

// queryRows returns the rows of a query as text. An error is the last row.
func queryRows(db *sql.DB, query string) (list [][]string) {
	rows, err := db.Query(query)
	if err != nil {
		return [][]string{{err.Error()}}
	}
	defer rows.Close()
	columns, _ := rows.Columns()
	for rows.Next() {
		values, pointers := make([]sql.NullString, len(columns)), make([]any, len(columns))
		for i := range values {
			pointers[i] = &values[i]
		}
		if err := rows.Scan(pointers...); err != nil {
			return append(list, []string{err.Error()})
		}
		var row []string
		for _, v := range values {
			row = append(row, v.String)
		}
		list = append(list, row)
	}
	return list
}
