package tickets

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"agentctl/relay/eventlog"
	"agentctl/relay/kernel"
)

// TestOnDisk: the real log keeps the events, those of a snapshot and of many drops too.
func TestOnDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", eventlog.FileName)
	// run has a plugin on the log for as long as fn takes.
	run := func(fn func(d *harness, log *eventlog.Store)) {
		t.Helper()
		log, err := eventlog.Open(eventlog.Options{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() { _ = log.Run(ctx) })
		defer func() {
			stop()
			wg.Wait()
			_ = log.Close()
		}()
		d := &harness{t: t, k: kernel.New(kernel.Options{Log: log})}
		d.p = New(d.k, log)
		if done, err := d.p.Restore(ctx, log); err != nil || done.Skipped > 0 {
			t.Fatalf("restored %+v, %v", done, err)
		}
		if err := d.k.Load(d.p, false); err != nil {
			t.Fatal(err)
		}
		// The writer may not have begun yet.
		for err = eventlog.ErrNotRunning; errors.Is(err, eventlog.ErrNotRunning); {
			_, err = log.Append(ctx, kernel.Event{Type: "test.ready"})
		}
		fn(d, log)
	}
	var before string
	run(func(d *harness, log *eventlog.Store) {
		id := d.do(ann, "create", object{"title": "<x>\u2028", "body": strings.Repeat("<", MaxBody), "approval": object{"action": "y"}}).Ticket.ID
		for i := range 20 {
			d.do(bob, "comment", object{"id": id, "text": fmt.Sprint(i, strings.Repeat("\x01", MaxComment-2))})
		}
		d.move(bob, id, Approved)
		d.create(ann, "next")
		before = dump(d.p)
	})
	run(func(d *harness, log *eventlog.Store) {
		if got := dump(d.p); got != before {
			t.Errorf("after a restart\n%.500s\nbefore\n%.500s", got, before)
		}
		if _, err := log.Append(t.Context(), d.p.Snapshot()...); err != nil {
			t.Errorf("the snapshot: %v", err)
		}
	})
	run(func(d *harness, _ *eventlog.Store) {
		if got := dump(d.p); got != before {
			t.Errorf("after a snapshot\n%.500s\nbefore\n%.500s", got, before)
		}
	})
}
