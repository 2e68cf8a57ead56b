package mcp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/relay/kernel"
	"agentctl/relay/mcp"
)

// hello is a plugin with one tool.
type hello struct{}

func (hello) Manifest() *kernel.Manifest {
	return &kernel.Manifest{Name: "hello", Version: "1.0.0", Tools: []*kernel.Tool{{Name: "hello.say", ToolInfo: &kernel.ToolInfo{
		Description: "Says hello.", Scope: "tools:call:read_only", OutputSchema: json.RawMessage(`{"type":"object"}`),
	}}}}
}

func (hello) Call(_ context.Context, r *kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{Structured: json.RawMessage(`{"hello":"` + r.Caller.Actor + `"}`)}, nil
}

type all struct{}

func (all) Has(string) bool { return true }

func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	k := kernel.New(kernel.Options{})
	if err := k.Load(hello{}, false); err != nil {
		panic(err)
	}
	h := mcp.New(mcp.Options{Kernel: k, Authenticate: func(*http.Request) (*kernel.Caller, error) {
		return &kernel.Caller{Tenant: "default", Actor: "Ada", Scopes: all{}}, nil
	}})
	go func() { _ = h.Run(ctx) }()
	srv := httptest.NewServer(h)
	defer srv.Close()

	client := sdk.NewClient(&sdk.Implementation{Name: "example", Version: "1"}, nil)
	cs, err := client.Connect(ctx, &sdk.StreamableClientTransport{Endpoint: srv.URL}, nil)
	for i := 0; err != nil && i < 100; i++ { // Run has not begun yet
		cs, err = client.Connect(ctx, &sdk.StreamableClientTransport{Endpoint: srv.URL}, nil)
	}
	if err != nil {
		panic(err)
	}
	res, err := cs.CallTool(ctx, &sdk.CallToolParams{Name: "hello.say"})
	if err != nil {
		panic(err)
	}
	fmt.Println(res.Content[0].(*sdk.TextContent).Text)
	_ = cs.Close()
	// Output: {"hello":"Ada"}
}
