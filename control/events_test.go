//go:build linux

package control

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

const bridge = `"metrics_stream"`

// stamps are the times of events, in ms since the first of them.
func stamps(ms []msg) (out []int) {
	for _, m := range ms {
		out = append(out, int(m.params()["ts"].(float64)-ms[0].params()["ts"].(float64)))
	}
	return out
}

func keys(m map[string]any) (out []string) {
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// run lets time pass and gives back the metrics that came in it.
func (p *peer) run(d time.Duration) []msg {
	p.take("metrics")
	time.Sleep(d)
	synctest.Wait()
	return p.take("metrics")
}

func TestEventBridge(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		plain := r.peer().hello(`"burst_mode","history_query"`)
		time.Sleep(3 * time.Second)
		if n := r.prober.Stats().Watchers; n != 0 {
			t.Errorf("%d watchers before anybody takes events", n)
		}
		p := r.peer().hello(bridge)
		time.Sleep(3500 * time.Millisecond)
		synctest.Wait()

		states := p.take("state")
		if len(states) != 1 || states[0].params()["phase"] != "start" || states[0].params()["reason"] != "hello" {
			t.Errorf("hello gives the states %v", states)
		}
		got := p.take("metrics")
		if want := []int{0, 1000, 2000, 3000}; fmt.Sprint(stamps(got)) != fmt.Sprint(want) {
			t.Errorf("metrics at %v, want %v", stamps(got), want)
		}
		for i, m := range got {
			if k := keys(m.params()); fmt.Sprint(k) != "[cpu memory seq ts]" {
				t.Errorf("metrics have %v", k)
			}
			if seq := m.params()["seq"]; seq != float64(i+1) {
				t.Errorf("event %d has seq %v", i, seq)
			}
		}

		p.ok("start", `{"modules":["cpu"]}`)
		for _, m := range p.run(2 * time.Second)[1:] {
			if k := keys(m.params()); fmt.Sprint(k) != "[cpu seq ts]" {
				t.Errorf("after start cpu metrics have %v", k)
			}
		}
		p.ok("start", `{"modules":["disk","memory"]}`)
		for _, m := range p.run(2 * time.Second)[1:] {
			if k := keys(m.params()); fmt.Sprint(k) != "[disk memory seq ts]" {
				t.Errorf("after start disk, memory metrics have %v", k)
			}
		}
		if got := plain.take(""); len(got) != 0 {
			t.Errorf("a connection without metrics_stream got %v", got)
		}

		p.nc.Close()
		synctest.Wait()
		if n := r.prober.Stats().Watchers; n != 0 {
			t.Errorf("%d watchers when nobody takes events any more", n)
		}
	})
}

// TestHelloKeepsModules checks that the hello of a second connection adds the default
// modules to those that are started.
func TestHelloKeepsModules(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		r.peer().hello("").ok("start", `{"modules":["disk"]}`)
		p := r.peer().hello(bridge)
		if got := fmt.Sprint(r.srv.Sampling().Modules); got != "[cpu mem disk]" {
			t.Errorf("running are %s", got)
		}
		p.ok("stop", "")
		r.peer().hello(bridge)
		if !r.srv.Sampling().Running {
			t.Error("hello with metrics_stream did not start")
		}
	})
}

func TestStates(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p, other := r.peer().hello(bridge), r.peer().hello(bridge)
		synctest.Wait()
		p.take("state")
		other.take("state")
		began := time.Now().UnixMilli()
		if got := fmt.Sprint(p.ok("start", `{"modules":["memory","cpu"]}`)); got != "map[ok:true started_modules:[cpu mem]]" {
			t.Errorf("start answers %s", got)
		}
		if got := fmt.Sprint(p.ok("stop", ``)); got != "map[ok:true]" {
			t.Errorf("stop answers %s", got)
		}
		expires := p.ok("burst_subscribe", `{"modules":["cpu","net"],"interval_ms":1000,"ttl_ms":10000}`)["expires_at"]
		if expires != float64(began+10_000) {
			t.Errorf("burst_subscribe expires at %v, want %d", expires, began+10_000)
		}
		for _, bad := range []string{"start", "stop", "burst_subscribe"} {
			p.call(bad, `{"nope":1}`)
		}
		synctest.Wait()
		want := []string{
			fmt.Sprintf("map[extra:map[modules:[cpu mem]] phase:start reason:start ts:%v]", float64(began)),
			fmt.Sprintf("map[phase:stop reason:stop ts:%v]", float64(began)),
			fmt.Sprintf("map[extra:map[expires_at:%v interval_ms:1000] phase:burst reason:burst_subscribe ts:%v]", expires, float64(began)),
		}
		for name, q := range map[string]*peer{"caller": p, "other": other} {
			var got []string
			for _, m := range q.take("state") {
				got = append(got, fmt.Sprint(m.params()))
			}
			if !slices.Equal(got, want) {
				t.Errorf("the %s got\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		}
	})
}

func TestStopAndSwitch(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		a, b := r.peer().hello(bridge), r.peer().hello(bridge)
		if n := len(b.run(5 * time.Second)); n < 5 || n > 6 {
			t.Errorf("%d metrics in 5 s, want 5", n)
		}
		a.ok("subscribe_metrics", `{"enable":false}`)
		if n := len(b.run(5 * time.Second)); n != 0 {
			t.Errorf("%d metrics while another connection has the switch off", n)
		}
		if n := r.prober.Stats().Watchers; n != 0 {
			t.Errorf("%d watchers with the switch off", n)
		}
		r.peer().hello("").ok("subscribe_metrics", `{"enable":true}`)
		if n := len(b.run(5 * time.Second)); n < 5 {
			t.Errorf("%d metrics in 5 s with the switch on again", n)
		}
		a.ok("stop", "")
		if n := len(b.run(5 * time.Second)); n != 0 {
			t.Errorf("%d metrics while stopped", n)
		}
		a.ok("subscribe_metrics", `{"enable":true}`)
		if n := len(b.run(5 * time.Second)); n != 0 {
			t.Errorf("the switch started %d metrics while stopped", n)
		}
		a.ok("start", "")
		if n := len(b.run(5 * time.Second)); n < 5 {
			t.Errorf("%d metrics in 5 s after start", n)
		}
		a.ok("subscribe_metrics", `{"enable":false}`)
		c := r.peer().hello(bridge)
		if n := len(c.run(5 * time.Second)); n < 5 {
			t.Errorf("%d metrics in 5 s for a connection that came with the switch off", n)
		}
	})
}

func TestBurst(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		p := r.peer().hello(bridge)
		p.ok("set_config", `{"module_intervals":{"mem":5000}}`)
		p.ok("burst_subscribe", `{"interval_ms":100,"ttl_ms":2000}`)
		got := p.run(2 * time.Second)
		if n := len(got); n < 19 || n > 24 { // each change of cadence sends a sample at once
			t.Errorf("%d metrics in a burst of 2 s at 100 ms", n)
		}
		for _, m := range got {
			if fmt.Sprint(keys(m.params())) != "[cpu memory seq ts]" {
				t.Errorf("a burst speeds up only %v", keys(m.params()))
			}
		}
		after := p.run(5 * time.Second)
		if n := len(after); n < 4 || n > 6 {
			t.Errorf("%d metrics in the 5 s after it, want about 5", n)
		}
		seen := map[string]bool{}
		for _, m := range append(got, after...) {
			ts := fmt.Sprint(m.params()["ts"])
			if seen[ts] {
				t.Errorf("the sample of %s was sent twice", ts)
			}
			seen[ts] = true
		}

		// Two bursts: the faster one counts while it lasts, and the slower behind it.
		p.ok("burst_subscribe", `{"interval_ms":500,"ttl_ms":4000}`)
		p.ok("burst_subscribe", `{"interval_ms":100,"ttl_ms":2000}`)
		if n := len(p.run(2 * time.Second)); n < 19 || n > 24 {
			t.Errorf("%d metrics in 2 s of the faster burst", n)
		}
		if n := len(p.run(2 * time.Second)); n < 3 || n > 6 {
			t.Errorf("%d metrics in 2 s of the slower burst", n)
		}

		for range maxBursts {
			p.ok("burst_subscribe", `{"interval_ms":1000,"ttl_ms":60000}`)
		}
		if m := p.call("burst_subscribe", `{"interval_ms":1000,"ttl_ms":1000}`); m.code() != CodeRateLimited {
			t.Errorf("burst %d gives %v", maxBursts+1, m)
		}
		time.Sleep(time.Minute)
		p.ok("burst_subscribe", `{"interval_ms":1000,"ttl_ms":1000}`)
	})
}

func TestSetConfig(t *testing.T) {
	var kept []Config
	var keepErr error
	keep := func(_ context.Context, c Config) error { kept = append(kept, c); return keepErr }
	inBubble(t, Options{Persist: keep}, func(t *testing.T, r *rig) {
		p := r.peer().hello(bridge)
		tests := []struct{ params, want string }{
			{``, "map[base_interval_ms:1000 effective_intervals:map[] ok:true]"},
			{`{"base_interval_ms":2000}`, "map[base_interval_ms:2000 effective_intervals:map[] ok:true]"},
			{`{"base_interval_ms":1000,"module_intervals":{"cpu":300,"memory":1200}}`, "map[base_interval_ms:1000 effective_intervals:map[cpu:300 mem:1200] ok:true]"},
			{`{"module_intervals":{"mem":1.2e3},"persist":false}`, "map[base_interval_ms:1000 effective_intervals:map[mem:1200] ok:true]"},
			{`{"base_interval_ms":1000,"module_intervals":{"cpu":300},"persist":true}`, "map[base_interval_ms:1000 effective_intervals:map[cpu:300] ok:true persisted:true]"},
		}
		for _, tt := range tests {
			if got := fmt.Sprint(p.ok("set_config", tt.params)); got != tt.want {
				t.Errorf("set_config %s: got %s, want %s", tt.params, got, tt.want)
			}
		}
		if fmt.Sprint(kept) != "[{1000 map[cpu:300] true}]" {
			t.Errorf("kept %v", kept)
		}
		if d := r.prober.Interval(); d != time.Second {
			t.Errorf("the prober samples each %v", d)
		}
		p.run(2 * time.Second)
		cpu, mem := 0, 0
		for _, m := range p.run(12 * time.Second) {
			if m.params()["cpu"] != nil {
				cpu++
			}
			if m.params()["memory"] != nil {
				mem++
			}
		}
		if cpu != 40 || mem != 10 {
			t.Errorf("in 12 s cpu came %d and memory %d times, want 40 and 10", cpu, mem)
		}
		keepErr = fmt.Errorf("disk full")
		if got := p.ok("set_config", `{"persist":true}`)["persisted"]; got != false {
			t.Errorf("persisted is %v when it was not", got)
		}
	})
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		if got := r.peer().hello("").ok("set_config", `{"persist":true}`)["persisted"]; got != false {
			t.Errorf("persisted is %v where nothing persists", got)
		}
	})
}

// TestSlowReader checks that a slow client gets the newest metrics when it reads again, that
// one which does not read at all is disconnected, and that neither delays other clients.
func TestSlowReader(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		good := r.peer().hello(bridge)
		nc := r.dial() // of the events nobody reads one: a write to a pipe waits
		hello := frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t","capabilities":["metrics_stream"]}}`))
		nc.Write(hello)
		// The answer is read: while it waits, jrpc2 holds a lock that its reader may want,
		// and a bubble with a goroutine that waits for a lock does not advance.
		if _, err := nc.Read(make([]byte, 1<<10)); err != nil {
			t.Fatal(err)
		}
		if n := len(good.run(4 * time.Second)); n < 4 {
			t.Errorf("%d metrics in 4 s beside a client that does not read", n)
		}
		if n := r.srv.Stats().Clients; n != 2 {
			t.Errorf("%d clients", n)
		}
		time.Sleep(writeTimeout)
		synctest.Wait()
		if n := r.srv.Stats().Clients; n != 1 {
			t.Errorf("%d clients after the write deadline, want 1", n)
		}
	})
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		nc := r.dial()
		nc.SetDeadline(time.Now().Add(time.Minute))
		nc.Write(frame([]byte(`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"app_version":"t","protocol_version":1,"token":"t","capabilities":["metrics_stream"]}}`)))
		in := newFrameReader(nc, maxAnswer)
		next := func() string {
			n, err := in.header()
			if err != nil {
				t.Fatal(err)
			}
			body := make([]byte, n)
			if err := in.body(body); err != nil {
				t.Fatal(err)
			}
			return string(body)
		}
		next() // the answer to hello
		next() // metrics 1
		next() // state
		for range 3 {
			time.Sleep(4 * time.Second)
			next()
		}
		synctest.Wait()
		if s := r.srv.Stats(); s.Dropped == 0 || s.Clients != 1 {
			t.Errorf("a reader at a quarter of the pace: %+v", s)
		}
		if got := next(); !strings.Contains(got, `"seq":1`) { // 1x: far beyond the 5th it read
			t.Errorf("the next event is %s, want a recent one", got)
		}
	})
}

func TestDeadlines(t *testing.T) {
	tests := []struct {
		name   string
		hello  bool
		write  string
		after  time.Duration // within a second of it the server hangs up; 0: never
		saying string
	}{
		{"silent", false, "", helloTimeout, "say hello"},
		{"half a hello", false, "Content-Length: 100\r\n\r\n{", helloTimeout, "say hello"},
		{"garbage for hello", false, "Content-Length: 1\r\n\r\n{", helloTimeout, "say hello"},
		{"silent after hello", true, "", 0, ""},
		{"half a header", true, "Content-L", frameTimeout, "must end within"},
		{"half a body", true, "Content-Length: 100\r\n\r\n{", frameTimeout, "must end within"},
		{"half a large body", true, "Content-Length: 1000000\r\n\r\n{", frameTimeout, "must end within"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, Options{}, func(t *testing.T, r *rig) {
				p := r.peer()
				if tt.hello {
					p.hello("")
				}
				p.raw(tt.write)
				if tt.after == 0 {
					time.Sleep(24 * time.Hour)
					p.ok("snapshot", "")
					return
				}
				time.Sleep(tt.after - time.Second)
				select {
				case <-p.ended:
					t.Fatal("hung up early")
				default:
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				select {
				case <-p.ended:
				default:
					t.Fatal("did not hang up")
				}
				last := p.take("")
				if len(last) == 0 || !strings.Contains(fmt.Sprint(last[len(last)-1]), tt.saying) {
					t.Errorf("it said %v, want %q", last, tt.saying)
				}
			})
		})
	}
}

// TestOneLargeMessage checks that one large message is in memory at a time, that the others
// wait for it, and that small ones do not.
func TestOneLargeMessage(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, r *rig) {
		a, b, c := r.peer().hello(""), r.peer().hello(""), r.peer().hello("")
		blank := strings.Repeat(" ", MaxMessage-100)
		large := string(frame([]byte(fmt.Sprintf(`{"jsonrpc":"2.0","id":"a",%s"method":"stop"}`, blank))))
		a.raw(large[:1000])
		synctest.Wait()
		wrote := false
		go func() { b.raw(large); wrote = true }()
		synctest.Wait()
		c.ok("snapshot", "")
		if wrote {
			t.Error("a second large message was read beside the first")
		}
		a.raw(large[1000:])
		synctest.Wait()
		if !wrote {
			t.Error("the second large message waits for ever")
		}
		for _, p := range []*peer{a, b} {
			if got := p.take(""); len(got) != 1 || got[0]["error"] != nil {
				t.Errorf("a large request gives %v", got)
			}
		}
		// A connection that ends in the middle gives its place up.
		a.raw(large[:1000])
		synctest.Wait()
		a.nc.Close()
		go b.raw(large)
		synctest.Wait()
		if got := b.take(""); len(got) != 1 {
			t.Errorf("behind a torn large message: %v", got)
		}
	})
}

// TestDrain checks that a daemon which stops answers the requests in progress and no others.
func TestDrain(t *testing.T) {
	work := make(chan struct{})
	status := func(ctx context.Context) any {
		select {
		case <-work:
			return map[string]bool{"done": true}
		case <-ctx.Done():
			return map[string]bool{"cut": true}
		}
	}
	for _, answered := range []bool{true, false} {
		t.Run(fmt.Sprint("answered ", answered), func(t *testing.T) {
			inBubble(t, Options{Status: status}, func(t *testing.T, r *rig) {
				work = make(chan struct{})
				idle := r.peer().hello(bridge)
				p := r.peer().hello("")
				time.Sleep(newConnGrace) // these are none
				p.send(`{"jsonrpc":"2.0","id":1,"method":"status"}`)
				synctest.Wait()
				go p.send(`{"jsonrpc":"2.0","id":2,"method":"stop"}`)
				began := time.Now()
				go func() {
					time.Sleep(drainTimeout / 2)
					if answered {
						close(work)
					}
				}()
				r.end()
				<-p.ended
				<-idle.ended
				took, got := time.Since(began), p.take("")
				if answered && (took != drainTimeout/2 || len(got) != 1 || got[0].result()["done"] != true) {
					t.Errorf("after %v got %v", took, got)
				}
				if !answered && (took != drainTimeout || len(got) != 0) {
					t.Errorf("after %v got %v", took, got)
				}
				if !r.srv.Sampling().Running {
					t.Error("a request behind the one in work was worked off")
				}
			})
		})
	}
}
