package sqlitefile

import (
	"bufio"
	"crypto/sha256"
	"database/sql"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"agentctl/sqlitefile/sqlitefiletest"
)

// snapshot describes all files of a directory with their contents.
func snapshot(t *testing.T, dir string) (s string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		info, _ := e.Info()
		s += fmt.Sprintf("%s %d %x\n", e.Name(), info.ModTime().UnixNano(), sha256.Sum256(b))
	}
	return s
}

func countReadOnly(t *testing.T, path string) (n int) {
	t.Helper()
	dsn, done, err := ReadOnly(path, "_busy_timeout=1000")
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRow("SELECT count(*) FROM t").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// writerEnv makes the test binary a process that has a database open until its stdin is closed.
const writerEnv = "SQLITEFILE_TEST_WRITER"

func TestMain(m *testing.M) {
	path := os.Getenv(writerEnv)
	if path == "" {
		sqlitefiletest.Main(m)
	}
	if err := holdDatabase(path); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// holdDatabase makes a database with 20 rows, most of them in its log, and closes it at the end of stdin.
func holdDatabase(path string) error {
	db, err := sql.Open("sqlite", DSN(path, "_journal_mode=WAL"))
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(1)
	if _, err := db.Exec("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT NOT NULL) STRICT"); err != nil {
		return err
	}
	for range 20 {
		if _, err := db.Exec("INSERT INTO t(v) VALUES ('a row')"); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return db.Close()
}

// startWriter starts such a process; stop ends it. Two connections of one process would share
// their map of the index.
func startWriter(t *testing.T, path string) (stop func()) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), writerEnv+"="+path)
	stdin, _ := cmd.StdinPipe()
	stdout, _ := cmd.StdoutPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatal(line, err)
	}
	return func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
}

// Reading changes no file, whatever state a process has left the database in.
func TestReadOnlyChangesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "live.db")
	stop := startWriter(t, path)
	check := func(what, path string) {
		t.Helper()
		before := snapshot(t, filepath.Dir(path))
		if n := countReadOnly(t, path); n != 20 {
			t.Errorf("%s: %d rows", what, n)
		}
		if after := snapshot(t, filepath.Dir(path)); after != before {
			t.Errorf("%s: the files changed:\n%s\n%s", what, before, after)
		}
	}
	check("while it is written", path)
	check("a copy with a log", copyDB(t, path, filepath.Join(t.TempDir(), "copy.db")))
	killed := copyDB(t, path, filepath.Join(t.TempDir(), "killed.db"))
	b, err := os.ReadFile(path + "-shm")
	if err == nil {
		err = os.WriteFile(killed+"-shm", b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	check("after a kill", killed)
	os.WriteFile(killed+"-shm", make([]byte, len(b)), 0o600)
	check("with a destroyed index", killed)
	stop()
	check("closed", path)
}
