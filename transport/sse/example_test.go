package sse_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"

	"agentctl/transport/fanout"
	"agentctl/transport/sse"
)

// metricStream is the stream of one subscriber.
type metricStream struct {
	sse.Stream
	sub *fanout.Subscriber[[]byte]
}

var errOffline = errors.New("device offline")

// OnReady implements sse.Handler.
func (m *metricStream) OnReady(uint64) error {
	for frame, ok := m.sub.Next(); ok; frame, ok = m.sub.Next() {
		if _, err := m.Send(frame, 1); err != nil {
			return err
		}
	}
	return m.sub.Err()
}

// OnEnd implements sse.Handler.
func (m *metricStream) OnEnd(err error) {
	code := sse.CodeOf(err)
	if errors.Is(err, errOffline) {
		code = sse.DeviceOffline
	}
	m.Close(code)
	m.sub.Close()
}

func Example() {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	var streams sse.Streams
	var topic fanout.Topic[[]byte]
	engine := sse.NewEngine()
	engine.AddShard(nil)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go engine.Run(ctx)
	opened := make(chan struct{})

	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		wr, err := streams.Open(w, r, sse.Options{})
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		m := &metricStream{Stream: sse.Stream{Writer: wr}}
		m.Handler = m
		m.sub = topic.Subscribe(fanout.SubscribeOptions[[]byte]{Buffer: 3, Overflow: fanout.Coalesce})
		if err := engine.Next().Add(&m.Stream); err != nil {
			m.OnEnd(err)
			return
		}
		m.sub.Notify(m.Wake)
		close(opened)
	})}
	go srv.Serve(sse.NewListener(tcp))
	defer srv.Close()

	go func() {
		<-opened
		frame, _ := sse.AppendEvent(nil, "metric", []byte(`{"cpu_pct":12.4}`))
		topic.Publish(frame)
		topic.Close(errOffline)
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
