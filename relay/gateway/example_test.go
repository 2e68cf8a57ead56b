package gateway_test

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"agentctl/relay/gateway"
	"agentctl/transport/sse"
)

func Example() {
	g, err := gateway.New(gateway.Options{Listen: "127.0.0.1:0"})
	if err != nil {
		panic(err)
	}
	ready := make(chan string, 1)
	g.OnReady(func(addr string) { ready <- addr })
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	ended := make(chan error)
	go func() { ended <- g.Run(ctx) }()

	res, err := http.Get("http://" + <-ready + gateway.StreamPath + "?topics=log/*")
	if err != nil {
		panic(err)
	}
	g.Emit(gateway.DefaultTenant, "log/level", map[string]string{"previous": "info", "current": "debug"})
	ev, err := sse.NewReader(res.Body, sse.ReaderOptions{}).Next()
	if err != nil {
		panic(err)
	}
	fmt.Println(ev.Type, string(ev.Data))
	_ = res.Body.Close()
	cancel()
	fmt.Println(<-ended)
	// Output:
	// log/level {"current":"debug","previous":"info"}
	// <nil>
}
