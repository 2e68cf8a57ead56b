package process

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"

	"agentctl/relay/kernel"
)

// A resource whose last watch ends while another one begins stays subscribed at the server, however their
// requests overtake each other.
func TestWatchAfterWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const uri = "mcp://odd/all.json"
		ours, theirs := net.Pipe()
		isSubscribed := false
		go func() {
			for in := bufio.NewScanner(theirs); in.Scan(); {
				var m struct {
					ID     json.RawMessage `json:"id"`
					Method string          `json:"method"`
				}
				_ = json.Unmarshal(in.Bytes(), &m)
				isSubscribed = m.Method == "resources/subscribe"
				_, _ = fmt.Fprintf(theirs, `{"jsonrpc":"2.0","id":%s,"result":{}}`+"\n", m.ID)
			}
		}()
		p := newPlugin(source{manifest: &kernel.Manifest{Name: "odd", Resources: []*kernel.Resource{{URI: uri, Watchable: true}}}}, newWatchSet(), "test", zap.NewNop())
		c := newConn(p, newLineChannel(ours, ours, func() { _ = ours.Close() }, ours.Close))
		defer c.close()
		p.watches.attach(t.Context(), c)
		end := func() {}
		for i := range 500 {
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _ = p.Watch(ctx, uri, func() {}) }()
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
