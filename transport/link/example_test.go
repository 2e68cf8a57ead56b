package link_test

import (
	"context"
	"fmt"
	"sync"

	"agentctl/manifest"
	"agentctl/transport/link"
)

// hello is a device that answers one tool.
type hello struct{}

func (hello) Capabilities() []manifest.Capability { return []manifest.Capability{manifest.Echo()} }

func (hello) Call(_ context.Context, _ manifest.ToolName, args []byte) ([]byte, link.StreamFunc, error) {
	return args, nil, nil
}

// acks is a relay that waits for one answer.
type acks struct{ done func() }

func (acks) OnAnnounce(*link.Manifest)   {}
func (acks) OnMetric(link.Metric) error  { return nil }
func (acks) OnStreamEnd(*link.StreamEnd) {}
func (acks) OnEvent(*link.Event)         {}
func (a acks) OnAck(_ string, ack link.CmdAck) bool {
	fmt.Println("answer:", string(ack.Result))
	a.done()
	return true
}

// A device and a relay in one process, over a pipe.
func Example() {
	ctx, stopDevice := context.WithCancel(context.Background())
	defer stopDevice()
	relayCtx, stopRelay := context.WithCancel(context.Background())
	defer stopRelay()
	device, relay := link.Pipe()
	client := link.NewClient(link.ClientOptions{
		Dial:       func(context.Context) (link.Conn, error) { return device, nil },
		Token:      func() (string, error) { return "secret", nil },
		InstanceID: "0123456789abcdef0123456789abcdef",
		Handler:    hello{},
	})
	var wg sync.WaitGroup
	wg.Go(func() { _ = client.Run(ctx) })

	session, m, err := link.Accept(relayCtx, relay, link.AcceptOptions{
		Authenticate: func(context.Context, *link.Auth) (*link.Grant, error) {
			return &link.Grant{NodeID: "01hzx9k3m4p7q8r9s0t1v2w3xy", Tenant: "acme"}, nil
		},
		ReconnectSpreadMS: func() int64 { return 1000 },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	tool := m.Tools[0].Canonical
	fmt.Println("tool:", tool)
	_ = session.Send(link.AppendCmd(nil, link.NewID(), tool, []byte(`{"message":"ping"}`), 0, "", link.Expiry{}))
	err = session.Run(relayCtx, acks{stopRelay})
	stopDevice()
	wg.Wait()
	fmt.Println("closed with", link.CloseCode(err))
	// Output:
	// tool: sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke
	// answer: {"message":"ping"}
	// closed with 4503
}
