package hub_test

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"agentctl/manifest"
	"agentctl/relay/hub"
	"agentctl/transport/link"
)

// parrot is a device with one tool, which returns its arguments.
type parrot struct{}

func (parrot) Capabilities() []manifest.Capability { return []manifest.Capability{manifest.Echo()} }

func (parrot) Call(_ context.Context, tool manifest.ToolName, _ []byte) ([]byte, link.StreamFunc, error) {
	return []byte(`{"message":"ping","received_at_ms":1800000000000,"node_id":"` + tool.NodeID + `"}`), nil, nil
}

// A device links to a hub and answers a call.
func Example() {
	ready := make(chan *hub.Node, 1)
	h := hub.New(hub.Options{
		Authenticate: func(context.Context, *link.Auth) (*link.Grant, error) {
			return &link.Grant{NodeID: "01hzx9k3m4p7q8r9s0t1v2w3xy", Tenant: "acme"}, nil
		},
		CheckResult: manifest.CheckAnswer,
		CheckSample: manifest.CheckFrame,
		OnReady:     func(n *hub.Node) { ready <- n },
	})
	client := link.NewClient(link.ClientOptions{
		Dial: func(context.Context) (link.Conn, error) {
			device, relay := link.Pipe()
			h.Attach(relay, netip.Addr{})
			return device, nil
		},
		Token:      func() (string, error) { return "secret", nil },
		InstanceID: "0123456789abcdef0123456789abcdef",
		Handler:    parrot{},
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.Run(ctx) })
	wg.Go(func() { _ = client.Run(ctx) })

	n := <-ready
	result, err := n.Call(ctx, &n.Tools()[0], []byte(`{"message":"ping"}`), hub.CallOptions{})
	fmt.Println(string(result), err)
	cancel()
	wg.Wait()
	// Output: {"message":"ping","received_at_ms":1800000000000,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"} <nil>
}
