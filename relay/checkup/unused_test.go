package checkup

import (
	"database/sql"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentctl/sqlitefile"
)

// isUnused reports whether two versions of a file have the same content: every table of a database
// has the same rows.
func isUnused(t testing.TB, path string, a, b []byte) bool {
	t.Helper()
	dir := t.TempDir()
	switch {
	case strings.HasSuffix(path, ".pem"): // the public key beside the private one is not read
		return pairText(t, filepath.Join(dir, "a.pem"), a) == pairText(t, filepath.Join(dir, "b.pem"), b)
	case strings.HasSuffix(path, "relay.json"): // what is behind relay.db is made anew from it
		var x, y record
		if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
			return false
		}
		behind := func(is, was string) bool { return is == was || is == "" }
		return x.RelayID == y.RelayID && x.Audience == y.Audience && y.Stores.RelayDB.Epoch <= x.Stores.RelayDB.Epoch && y.Stores.EventsDB.LastSeq <= x.Stores.EventsDB.LastSeq &&
			behind(y.Stores.RelayDB.ID, x.Stores.RelayDB.ID) && behind(y.Stores.EventsDB.ID, x.Stores.EventsDB.ID)
	case !strings.HasSuffix(path, ".db"):
		return false
	}
	return dump(t, filepath.Join(dir, "a.db"), a) == dump(t, filepath.Join(dir, "b.db"), b)
}

// pairText is what of a file with a key and a certificate is used.
func pairText(t testing.TB, path string, content []byte) string {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	cert, err := readPair(path)
	if err != nil {
		return err.Error()
	}
	return string(cert.Raw)
}

func dump(t testing.TB, path string, content []byte) string {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", sqlitefile.DSN(path, "mode=ro&immutable=1"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var out strings.Builder
	query := func(q string) (list [][]string) {
		rows, err := db.Query(q)
		if err != nil {
			return [][]string{{err.Error()}}
		}
		defer rows.Close()
		columns, _ := rows.Columns()
		for rows.Next() {
			values, to := make([]sql.NullString, len(columns)), make([]any, len(columns))
			for i := range values {
				to[i] = &values[i]
			}
			if err := rows.Scan(to...); err != nil {
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
	out.WriteString(strings.Join(query("PRAGMA user_version")[0], " ") + strings.Join(query("PRAGMA application_id")[0], " "))
	for _, table := range query("SELECT name, sql FROM sqlite_schema ORDER BY name") {
		out.WriteString(strings.Join(table, " "))
		if strings.HasPrefix(table[1], "CREATE TABLE") {
			for _, row := range query("SELECT * FROM " + table[0]) {
				out.WriteString(strings.Join(row, "|") + "\n")
			}
		}
	}
	return out.String()
}
