package process

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
)

const watchedURI = "mcp://odd/all.json"

// connectWatched returns a plugin with one resource, connected to a server in memory. handle gets the method
// of each message of the relay, and a function that answers it.
func connectWatched(t *testing.T, handle func(method string, answer func())) *Plugin {
	ours, theirs := net.Pipe()
	go func() {
		for in := bufio.NewScanner(theirs); in.Scan(); {
			var m struct {
				ID     json.RawMessage `json:"id"`
				Method string          `json:"method"`
			}
			_ = json.Unmarshal(in.Bytes(), &m)
			handle(m.Method, func() { _, _ = fmt.Fprintf(theirs, `{"jsonrpc":"2.0","id":%s,"result":{}}`+"\n", m.ID) })
		}
	}()
	p := newPlugin(source{manifest: &kernel.Manifest{Name: "odd", Resources: []*kernel.Resource{{URI: watchedURI, Watchable: true}}}}, newWatchSet(), "test", zap.NewNop())
	c := newConn(p, newLineChannel(ours, ours, func() { _ = ours.Close() }, ours.Close))
	t.Cleanup(func() { c.close() })
	p.watches.attach(t.Context(), c)
	return p
}

// A resource whose last watch ends while another one begins stays subscribed at the server, however their
// requests overtake each other.
func TestWatchAfterWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		isSubscribed := false
		p := connectWatched(t, func(method string, answer func()) {
			isSubscribed = method == "resources/subscribe"
			answer()
		})
		end := func() {}
		for i := range 500 {
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _ = p.Watch(ctx, watchedURI, func() {}) }()
			end()
			synctest.Wait()
			if !isSubscribed {
				t.Fatalf("watch %d: the server is not subscribed", i)
			}
			end = cancel
		}
		end()
		synctest.Wait()
		if isSubscribed {
			t.Error("without a watch the server is still subscribed")
		}
	})
}

// A watch that ends while the server has not answered its subscription leaves another watch of the
// resource subscribed.
func TestWatchEndsWhileSubscribing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		isSubscribed := false
		var pending *time.Timer
		p := connectWatched(t, func(method string, answer func()) {
			switch method {
			case "resources/subscribe":
				pending = time.AfterFunc(time.Second, func() {
					isSubscribed = true
					answer()
				})
			case "notifications/cancelled": // the server forgets the request
				pending.Stop()
			}
		})
		first, end := context.WithCancel(t.Context())
		go func() { _ = p.Watch(first, watchedURI, func() {}) }()
		synctest.Wait()
		second, endSecond := context.WithCancel(t.Context())
		defer endSecond()
		go func() { _ = p.Watch(second, watchedURI, func() {}) }()
		synctest.Wait()
		end()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if !isSubscribed {
			t.Error("the server is not subscribed, and a watch goes on")
		}
	})
}
