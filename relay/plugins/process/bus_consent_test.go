package process

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/relay/kernel"
)

// A consent may change while a connection begins, before anything can be sent on it.
func TestConsentAtStart(t *testing.T) {
	b := NewBus(BusOptions{Kernel: kernel.New(kernel.Options{}), Log: &kernel.MemoryLog{}, Consent: func(string, string) []string { return []string{"default"} }})
	_, declared, err := parse([]byte((&busPlugin{name: "notes", bus: `{"append": ["notes.*"]}`}).manifest()))
	if err != nil {
		t.Fatal(err)
	}
	bc := b.attach(&conn{plugin: newPlugin(source{manifest: &kernel.Manifest{Name: "notes"}, declared: declared}, newWatchSet(), "test", New(Options{}).log)})
	granted, _ := bc.consent()
	b.Refresh("notes")
	if granted.Err() == nil {
		t.Error("the consent before is still in force")
	}
	bc.close()
}

// deafPlugin makes the handshake and then reads nothing.
func deafPlugin(ctx context.Context, rw io.ReadWriteCloser) error {
	lines := bufio.NewScanner(rw)
	for lines.Scan() {
		var m struct {
			ID     json.RawMessage
			Method string
		}
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return err
		}
		if m.Method == "agentctl/consent" {
			break
		}
		if len(m.ID) > 0 {
			answer := `{"jsonrpc":"2.0","id":` + string(m.ID) + `,"result":{"protocolVersion":"` + protocolVersion + `","capabilities":{},"tools":[{"name":"deaf.run"}]}}` + "\n"
			if _, err := io.WriteString(rw, answer); err != nil {
				return err
			}
		}
	}
	<-ctx.Done()
	return nil
}

// An operator who takes a consent back does not wait for a plugin that reads nothing.
func TestRefreshDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBusHarness(t)
		p := &busPlugin{name: "deaf", bus: `{"call": ["notes.run"]}`}
		r.h.o.Bundled["deaf"] = Bundled{Manifest: []byte(p.manifest()), Serve: deafPlugin}
		if err := (&harness{t: t, k: r.k, h: r.h}).load("deaf"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		start := time.Now()
		r.allow(p, "default")
		synctest.Wait()
		r.allow(p) // while the first notification is being sent
		if d := time.Since(start); d > 0 {
			t.Errorf("Refresh took %s", d)
		}
	})
}
