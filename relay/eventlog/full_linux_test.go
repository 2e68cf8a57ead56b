package eventlog

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// A full disk refuses appends with the reason and keeps none of their events; when there
// is space again the log continues by itself.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount a small filesystem here (root may): %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, FileName)
	dropped := make(chan []Event, 1)
	s := open(t, Options{Path: path, OnDrop: func(e []Event) { dropped <- slices.Clone(e) }})
	run(t, s)
	kept := []uint64{mustAppend(t, s, event("call", "t", 0))}
	ballast := filepath.Join(dir, "ballast")
	fill(t, ballast)

	big := event("call", "big", 0)
	big.Payload = []byte(`{"x":"` + strings.Repeat("x", 50_000) + `"}`)
	failures := 0
	for range 25 { // what fits into the files' last pages is kept
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if _, err := s.Append(context.Background(), event("call", "pair", 0), big); err != nil && !strings.Contains(err.Error(), "full disk, nothing was kept") {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		seq, err := s.Append(context.Background(), event("call", "pair", 0), big)
		if err != nil {
			failures++
		} else {
			kept = append(kept, seq)
		}
	}
	st := s.Stats()
	if failures < 10 || st.FailedCommits == 0 || !strings.Contains(st.LastError, "df -h") {
		t.Fatalf("%d failures, stats %+v", failures, st)
	}
	s.Offer(big)
	if e := <-dropped; len(e) != 1 || e[0].Aggregate != "big" || s.Stats().Dropped != 1 {
		t.Errorf("%d events were reported as dropped, stats %+v", len(e), s.Stats())
	}

	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	kept = append(kept, mustAppend(t, s, event("call", "t", 1)))
	if st := s.Stats(); st.LastError != "" || st.Last != kept[len(kept)-1] {
		t.Errorf("stats %+v", st)
	}
	got, pairs := map[uint64]bool{}, map[string]int{}
	for _, e := range all(t, s, Query{}) {
		got[e.Seq] = true
		pairs[e.Aggregate]++
	}
	for _, seq := range kept {
		if !got[seq] {
			t.Errorf("%d was kept, and is not there", seq)
		}
	}
	if pairs["pair"] != pairs["big"] || int64(len(got)) != s.Stats().Events {
		t.Errorf("appends were kept in half: %v of %d events; stats %+v", pairs, len(got), s.Stats())
	}
	integrity(t, path)
}

func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}
