package hub

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// handler answers like a real device, with made-up figures.
type handler struct{ node string }

func (h handler) Capabilities() []manifest.Capability {
	return []manifest.Capability{manifest.Echo(), manifest.Metrics()}
}

func (h handler) Call(_ context.Context, tool manifest.ToolName, args []byte) ([]byte, link.StreamFunc, error) {
	switch tool.Verb {
	case manifest.VerbInvoke:
		return []byte(fmt.Sprintf(`{"message":"hello","received_at_ms":%d,"node_id":%q}`, time.Now().UnixMilli(), tool.NodeID)), nil, nil
	case manifest.VerbSnapshot:
		return []byte(sample(tool.NodeID, 1)), nil, nil
	}
	return args, func(ctx context.Context, send func([]byte) error) error {
		t := time.NewTicker(time.Second)
		defer t.Stop()
		for cpu := 0; ; cpu++ {
			if err := send([]byte(sample(tool.NodeID, cpu%100))); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-t.C:
			}
		}
	}, nil
}

// client is a link.Client, linked to the hub that is set.
type client struct {
	*link.Client
	stop context.CancelFunc
	done chan error

	mu  sync.Mutex
	hub *Hub // nil: the relay is down
}

func startClient(node, instance string, hub *Hub) *client {
	c := &client{done: make(chan error, 1), hub: hub}
	c.Client = link.NewClient(link.ClientOptions{
		Dial: func(context.Context) (link.Conn, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.hub == nil {
				return nil, errors.New("connection refused")
			}
			dev, rel := link.Pipe()
			c.hub.Attach(rel, netip.Addr{})
			return dev, nil
		},
		Token: func() (string, error) { return node, nil }, InstanceID: instance, Handler: handler{node},
	})
	ctx, cancel := context.WithCancel(context.Background())
	c.stop = cancel
	go func() { c.done <- c.Run(ctx) }()
	synctest.Wait()
	return c
}

func (c *client) use(h *Hub) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hub = h
}

func (c *client) end() { c.stop(); <-c.done }

// TestPair runs a device and its relay through a day: calls, streams, a restart of the
// relay, idle hours.
func TestPair(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		c := startClient(nodeA, instance1, r.hub)
		n := r.node(nodeA)
		if a := <-r.call(n, "hello"); a.err != nil || a.took != 0 {
			t.Errorf("echo: %+v", a)
		}
		if got, err := n.Call(t.Context(), r.tool(n, "metrics.snapshot"), nil, CallOptions{}); err != nil || string(got) != sample(nodeA, 1) {
			t.Errorf("snapshot: %s, %v", got, err)
		}
		reader, err := r.subscribe(t.Context(), n, 1000)
		if err != nil {
			t.Fatal(err)
		}
		got := 0
		for range 100 {
			<-reader.Ready()
			got += frames(reader)
		}
		if got != 100 {
			t.Errorf("%d frames", got)
		}
		r.end()
		if !errors.Is(reader.Err(), ErrOffline) {
			t.Errorf("the reader ended with %v", reader.Err())
		}
		reader.Close()
		synctest.Wait()
		if s := c.Status(); s.State != link.StateWaiting || s.LastCode != link.CloseDraining {
			t.Errorf("status %+v", s)
		}

		again := newTestHub(t)
		c.use(again.hub)
		time.Sleep(time.Second) // the reconnect spread of the first relay
		if again.node(nodeA) == nil {
			t.Errorf("the device is not back: %+v", c.Status())
		}
		time.Sleep(8 * time.Hour)
		if s := c.Status(); s.State != link.StateReady || s.Reconnects != 1 || s.Drops != 0 {
			t.Errorf("after quiet hours: %+v", s)
		}
		c.end()
		again.wantEvents("device_connect acme y, device_disconnect acme y 1000")
		again.end()
	})
}

// TestClonedClients: two boards flashed with one image alternate, less and less often.
func TestClonedClients(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newTestHub(t)
		a := startClient(nodeA, instance1, r.hub)
		b := startClient(nodeA, instance2, r.hub)
		time.Sleep(24 * time.Hour)
		if n := r.hub.Stats().Takeovers; n < 20 || n > 60 {
			t.Errorf("%d takeovers in a day", n)
		}
		if !a.Status().CloneSuspected || !b.Status().CloneSuspected {
			t.Error("no board reports CloneSuspected")
		}
		a.end()
		b.end()
		r.end()
	})
}
