package sse_test

import (
	"errors"
	"fmt"
	"net"
	"net/http"

	"agentctl/transport/fanout"
	"agentctl/transport/sse"
)

func Example() {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	var streams sse.Streams
	var topic fanout.Topic[[]byte]
	offline := errors.New("device offline")
	opened := make(chan struct{})

	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sub := topic.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 3, Overflow: fanout.Coalesce})
		defer sub.Close()
		wr, err := streams.Open(w, r, sse.Options{})
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		close(opened)
		reason := sse.Run(r.Context(), wr, sub, func(frame []byte) []byte { return frame })
		code := sse.CodeOf(reason)
		if errors.Is(reason, offline) {
			code = sse.DeviceOffline
		}
		wr.Close(code)
	})}
	go srv.Serve(sse.NewListener(tcp))
	defer srv.Close()

	go func() {
		<-opened
		frame, _ := sse.AppendEvent(nil, "metric", []byte(`{"cpu_pct":12.4}`))
		topic.Publish(frame)
		topic.Close(offline)
	}()

	res, err := http.Get("http://" + tcp.Addr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer res.Body.Close()
	fmt.Println(res.Header.Get("Content-Type"))
	events := sse.NewReader(res.Body, sse.ReaderOptions{})
	for {
		ev, err := events.Next()
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s %s\n", ev.Type, ev.Data)
	}
	// Output:
	// text/event-stream; charset=utf-8
	// metric {"cpu_pct":12.4}
	// close {"code":4503,"reason":"device_offline"}
	// EOF
}
