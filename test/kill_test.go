package test

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"agentctl/control"
)

// recorded is what a reader of history.db has seen, and what is committed therefore.
type recorded struct {
	samples  map[int64][7]int64 // by ts
	readings map[int64]int64    // by id
}

// read adds what is new in the file, or all there is.
func (r *recorded) read(db *sql.DB, all bool) error {
	var sample, reading int64
	if !all {
		for ts := range r.samples {
			sample = max(sample, ts)
		}
		for id := range r.readings {
			reading = max(reading, id)
		}
	}
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	rows, err := tx.Query("SELECT ts, cpu, mem, mem_total, disk, load_1m, load_5m, load_15m FROM samples WHERE ts > ?", sample)
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var ts int64
		var v [7]int64
		if err := rows.Scan(&ts, &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6]); err != nil {
			return err
		}
		r.samples[ts] = v
	}
	if err := rows.Err(); err != nil {
		return err
	}
	more, err := tx.Query("SELECT id, value FROM readings WHERE id > ?", reading)
	if err != nil {
		return err
	}
	defer func() { _ = more.Close() }()
	for more.Next() {
		var id, value int64
		if err := more.Scan(&id, &value); err != nil {
			return err
		}
		r.readings[id] = value
	}
	return more.Err()
}

// checkCommitted checks that the file, and the daemon that has it open, have all that was committed.
func (r *recorded) checkCommitted(t *testing.T, db *sql.DB, socket string) {
	t.Helper()
	var result string
	if err := db.QueryRow("PRAGMA integrity_check").Scan(&result); err != nil || result != "ok" {
		t.Fatalf("integrity_check: %q, %v", result, err)
	}
	now := recorded{samples: map[int64][7]int64{}, readings: map[int64]int64{}}
	if err := now.read(db, true); err != nil {
		t.Fatal(err)
	}
	for ts, v := range r.samples {
		if now.samples[ts] != v {
			t.Fatalf("the sample of %d was %v, is %v", ts, v, now.samples[ts])
		}
	}
	for id, v := range r.readings {
		if got, ok := now.readings[id]; !ok || got != v {
			t.Fatalf("the reading of %d was %d, is %d (%v)", id>>8, v, got, ok)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := control.Dial(ctx, socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	var status struct {
		Storage struct{ State string }
	}
	if err := c.Status(ctx, &status); err != nil || status.Storage.State != "ok" {
		t.Fatalf("storage is %q (%v) after a kill", status.Storage.State, err)
	}
	returned := make(map[int64]bool)
	err = c.HistoryEach(ctx, control.HistoryQuery{FromMS: 1}, func(item control.HistoryItem) error {
		returned[item.TS] = true
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for ts := range now.samples {
		if !returned[ts] {
			t.Fatalf("the daemon does not return the sample of %d, which is in its file", ts)
		}
	}
	*r = now
}

// kill -9 of the real daemon, again and again: while it starts, during a commit, and at other times.
// What any reader of the file has seen once is there after the next start, in the file and on the
// socket, and the file is sound. 60 times with AGENTCTL_SLOW=1.
func TestKilledDaemonKeepsWhatItCommitted(t *testing.T) {
	t.Parallel()
	rounds := 3
	if os.Getenv("AGENTCTL_SLOW") != "" {
		rounds = 60
	}
	dir, err := os.MkdirTemp("", "ac") // short: a socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path, socket := filepath.Join(dir, "history.db"), filepath.Join(dir, "s")
	daemon := func() *process {
		return startProcess(t, nil, binary(t, "agentctl-board", "agentctl_omit_relay"), "run", "--state-dir", dir, "--socket", socket,
			"--config", filepath.Join(dir, "none.yaml"), "--interval", "100ms", "--history-flush", "1s")
	}
	if err := os.WriteFile(filepath.Join(dir, "none.yaml"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	first := daemon() // makes the file
	first.waitOutput(`"msg":"ready"`)
	first.stop()
	db, err := sql.Open("sqlite", "file:"+path+"?mode=ro&_pragma=busy_timeout(2000)")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	db.SetMaxIdleConns(0) // each query opens the file as it is

	seen := recorded{samples: map[int64][7]int64{}, readings: map[int64]int64{}}
	for round := range rounds {
		p := daemon()
		switch round % 3 {
		case 0: // while it starts, and recovers what the last kill left
			time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		case 1: // during a commit: the write-ahead log has begun to change
			p.waitOutput(`"msg":"ready"`)
			before := modified(path + "-wal")
			for end := time.Now().Add(5 * time.Second); modified(path+"-wal") == before && time.Now().Before(end); {
				time.Sleep(100 * time.Microsecond)
			}
			time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
		case 2: // up to a second after a commit that was seen
			had := len(seen.samples)
			eventually(t, "a commit", func() bool { return seen.read(db, false) == nil && len(seen.samples) > had })
			for end := time.Now().Add(time.Duration(rand.IntN(1000)) * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
				if err := seen.read(db, false); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = p.cmd.Process.Kill()
		<-p.ended
		next := daemon()
		next.waitOutput(`"msg":"ready"`)
		seen.checkCommitted(t, db, socket)
		_ = next.cmd.Process.Kill()
		<-next.ended
	}
	if aside, _ := filepath.Glob(path + ".corrupt-*"); len(aside) > 0 {
		t.Errorf("set aside as corrupt: %v", aside)
	}
	if want := rounds / 3; len(seen.samples) < want || len(seen.readings) == 0 {
		t.Errorf("%d samples and %d readings were committed; %d samples or more were to be", len(seen.samples), len(seen.readings), want)
	}
	t.Logf("%d kills: all of %d samples and %d readings kept", 2*rounds, len(seen.samples), len(seen.readings))
}

// modified is when a file changed last, 0 where there is none.
func modified(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.ModTime().UnixNano()
}
