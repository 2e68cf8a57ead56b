package link

import (
	"context"
	"slices"
	"testing"
	"time"

	"agentctl/manifest"
)

// A kind that came with v2.1 is announced and accepted there; on v2 the device leaves it out,
// and a relay rejects it like an unknown one.
func TestKindsOfVersions(t *testing.T) {
	all := []manifest.Capability{manifest.Echo(), manifest.History()}
	accept := func(t *testing.T, rel Conn) *Manifest {
		t.Helper()
		_, m, err := Accept(t.Context(), rel, AcceptOptions{
			Authenticate: func(context.Context, *Auth) (*Grant, error) {
				return &Grant{NodeID: "01hzx9k3m4p7q8r9s0t1v2w3xy", Tenant: "acme"}, nil
			},
			ReconnectSpreadMS: func() int64 { return 1000 },
		})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	for version, tt := range map[string]struct {
		pipe func() (device, relay Conn)
		want []string
	}{"v2": {Pipe, []string{"echo"}}, "v2.1": {Pipe21, []string{"echo", "history"}}} {
		bubble(t, func(t *testing.T) {
			dev, rel := tt.pipe()
			ctx, stop := context.WithCancel(t.Context())
			client := NewClient(ClientOptions{Dial: func(context.Context) (Conn, error) { return dev, nil }, InstanceID: testInstance,
				Token: func() (string, error) { return "good", nil }, Handler: &testHandler{caps: all}})
			done := make(chan error, 1)
			go func() { done <- client.Run(ctx) }()
			var got []string
			m := accept(t, rel)
			for _, c := range m.Capabilities {
				got = append(got, c.CapID)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("%s: the device announces %v, want %v", version, got, tt.want)
			}
			if len(all) != 2 || all[1].CapID != "history" {
				t.Error("the handler's list has changed")
			}
			stop()
			_ = rel.Close(CloseNormal, "normal")
			<-done

			dev, rel = tt.pipe()
			p := &peer{t, dev}
			p.sendAs(TypeAuth, "", goodAuth())
			p.sendAs(TypeAnnounce, "", announceOf(capsJSON(all...)))
			if m := accept(t, rel); len(m.Capabilities) != len(tt.want) {
				t.Errorf("%s: the relay serves %d capabilities, want %v", version, len(m.Capabilities), tt.want)
			}
			p.close()
		})
	}
}

// The stored answers are bounded: the oldest large ones are given up, and their commands are
// still known.
func TestDedupBytes(t *testing.T) {
	var d dedupTable
	now := time.Now()
	large := make([]byte, 60<<10)
	ids := make([]string, 100)
	for i := range ids {
		ids[i] = NewID()
		d.begin(ids[i], 1, now)
		if i%2 == 0 {
			d.finish(ids[i], large, false, now)
		} else {
			d.finish(ids[i], []byte("small"), false, now)
		}
	}
	if d.bytes > maxDedupBytes {
		t.Errorf("%d bytes are stored", d.bytes)
	}
	for i, id := range ids {
		isNew, ack, ok := d.begin(id, 1, now)
		switch kept := len(ack) == len(large); {
		case isNew || !ok || len(ack) == 0:
			t.Fatalf("command %d is new or without an answer", i)
		case i%2 == 0 && kept != (i >= 100-2*16):
			t.Errorf("answer %d is kept: %v", i, kept)
		case i%2 == 1 && string(ack) != "small":
			t.Errorf("answer %d is %q", i, ack)
		}
	}
	sum := 0
	for _, c := range d.byID {
		sum += len(c.ack)
	}
	if sum != d.bytes {
		t.Errorf("%d bytes are counted, %d are stored", d.bytes, sum)
	}
}
