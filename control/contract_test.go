//go:build linux

package control

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/manifest"
	"agentctl/prober"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// contract is testdata/contract.json, the frozen document in a form that a program
// can hold the server against.
type contract struct {
	ProtocolVersion int `json:"protocol_version"`
	Capabilities    struct{ Known, Served []string }
	Modules         []string
	Codes           map[string]int
	Methods         map[string]struct{ Params, Result any }
	Events          map[string]any
	Dialogue        []struct {
		When       string
		Send, Recv any
	}
}

func readContract(t *testing.T) (*contract, *jsonschema.Compiler) {
	t.Helper()
	b, err := os.ReadFile("testdata/contract.json")
	if err != nil {
		t.Fatal(err)
	}
	var c contract
	if err := json.Unmarshal(b, &c); err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	if err := compiler.AddResource("contract.json", doc); err != nil {
		t.Fatal(err)
	}
	return &c, compiler
}

// TestContractIsComplete checks that contract and code have the same methods, events and codes.
func TestContractIsComplete(t *testing.T) {
	c, _ := readContract(t)
	names := append(slices.Collect(maps.Keys(methods)), MethodHello)
	for _, tt := range []struct {
		what       string
		file, code []string
	}{
		{"methods", slices.Collect(maps.Keys(c.Methods)), names},
		{"events", slices.Collect(maps.Keys(c.Events)), []string{EventMetrics, EventState, EventAlert, EventPing, EventUpdateReady}},
		{"known capabilities", c.Capabilities.Known, slices.Clone(capabilities)},
		{"served capabilities", c.Capabilities.Served, slices.Clone((&Server{o: Options{History: tape{}}}).servedCapabilities())},
		{"modules", c.Modules, prober.AllModules.Names()},
	} {
		slices.Sort(tt.file)
		slices.Sort(tt.code)
		if !slices.Equal(tt.file, tt.code) {
			t.Errorf("%s: the contract has %v, the code %v", tt.what, tt.file, tt.code)
		}
	}
	codes := map[string]int{}
	for code, word := range codeWords {
		codes[word] = code
	}
	if !maps.Equal(codes, c.Codes) {
		t.Errorf("codes: the contract has %v, the code %v", c.Codes, codes)
	}
	if c.ProtocolVersion != ProtocolVersion {
		t.Errorf("protocol_version: the contract has %d, the code %d", c.ProtocolVersion, ProtocolVersion)
	}
}

// wholeOptions are those of a daemon that has everything, as the dialogue expects it.
func wholeOptions() Options {
	a := prober.Sample{CPUPct: 10.1, MemTotalBytes: 16000 << 20, MemBytes: 7650 << 20, DiskPct: 40.25, Load1: 0.5, Load5: 0.25, Load15: 0.1}
	b := a
	b.CPUPct, b.MemBytes = 11, 7651<<20
	readings := []prober.Reading{readingOf("network.bytes_in_per_s", 1000.5), readingOf("network.bytes_out_per_s", 20), readingOf("power.throttled", 0), readingOf("power.under_voltage", 1),
		readingOf("somebody.else", 1), readingOf("temperature.hottest_c", 51.2), readingOf("wear.pre_eol", 0), readingOf("wear.used_pct", 10)}
	return Options{
		Version: "1.0.0",
		Status:  func(context.Context) any { return map[string]int{"uptime_s": 7} },
		History: tape{{1893456000000, &a, readings}, {1893456001000, &b, nil}},
		GetConfig: func(context.Context) any {
			return map[string]any{"interval_ms": map[string]any{"value": 1000, "origin": "default"}}
		},
		Capabilities: func() any {
			return map[string]any{"node_id": "01j9zq3v8k5m7n2p4r6s8t0w1x", "capabilities": []any{map[string]any{"cap_id": "echo", "verbs": []string{"invoke"}}}}
		},
		Call: func(_ context.Context, tool string, args json.RawMessage) (json.RawMessage, error) {
			if tool != "sysecho.01j9zq3v8k5m7n2p4r6s8t0w1x.echo.invoke" {
				return nil, manifest.E(manifest.ManifestInvalid, "the tool is not in this device's manifest")
			}
			return args, nil
		},
	}
}

// TestContractDialogue runs the dialogue of the contract and validates requests, answers and
// events against the schemas.
func TestContractDialogue(t *testing.T) {
	c, compiler := readContract(t)
	valid := func(pointer string, v any) error { return compiler.MustCompile("contract.json#" + pointer).Validate(v) }
	tried := map[string]bool{}
	when := map[string]func(*Server){
		"an alert is raised": func(s *Server) {
			s.PublishAlert(Alert{"warn", "cpu_pct", 97.5, 95, "cpu", "cpu use is 97.5 %", 1893456000000})
		},
		"a newer version is there": func(s *Server) { s.PublishUpdateReady("agentctl", "1.2.3") },
		"30 seconds pass":          func(*Server) { time.Sleep(30 * time.Second) },
	}
	inBubble(t, wholeOptions(), func(t *testing.T, r *rig) {
		nc := r.dial()
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(time.Minute))
		// The client reads at all times: a server whose write is stuck in an unbuffered pipe
		// holds a lock that another of its goroutines waits for, and synctest.Wait never
		// sees that goroutine at rest.
		answers := make(chan []byte, len(c.Dialogue))
		go func() {
			defer close(answers)
			in := newFrameReader(nc, maxAnswer)
			for {
				n, err := in.header()
				if err != nil {
					return
				}
				body := make([]byte, n)
				if in.body(body) != nil {
					return
				}
				answers <- body
			}
		}()
		for i, step := range c.Dialogue {
			send, _ := step.Send.(map[string]any)
			if step.Send != nil {
				b, _ := json.Marshal(step.Send)
				if _, err := nc.Write(frame(b)); err != nil {
					t.Fatal(err)
				}
			}
			if step.When != "" {
				when[step.When](r.srv)
			}
			synctest.Wait() // so that an event and an answer have their order
			body, ok := <-answers
			if !ok {
				t.Fatalf("step %d: the server hung up", i)
			}
			var got map[string]any
			if err := json.Unmarshal(body, &got); err != nil {
				t.Fatal(err)
			}
			checkSnakeCase(t, got)
			if next := i + 1; step.Send == nil && next < len(c.Dialogue) && c.Dialogue[next].Send == nil && c.Dialogue[next].When == "" {
				// The order of two events of different names is no promise.
				if other, _ := c.Dialogue[next].Recv.(map[string]any); other["method"] == got["method"] {
					c.Dialogue[next].Recv, step.Recv = step.Recv, c.Dialogue[next].Recv
				}
			}
			if want := fill(step.Recv, got); !reflect.DeepEqual(got, want) {
				w, _ := json.Marshal(want)
				t.Fatalf("step %d: got\n%s\nwant\n%s", i, body, w)
			}

			var err error
			method := fmt.Sprint(send["method"])
			switch {
			case send == nil && got["method"] != nil:
				tried[fmt.Sprint(got["method"])] = true
				err = valid("/events/"+fmt.Sprint(got["method"]), got["params"])
			case got["error"] != nil:
				err = valid("/$defs/error", got["error"])
				if c.Methods[method].Params != nil && fromServer(got) && valid("/methods/"+method+"/params", send["params"]) == nil {
					t.Errorf("step %d: the server refuses params the contract allows", i)
				}
			default:
				tried[method] = true
				err = valid("/methods/"+method+"/result", got["result"])
				if perr := valid("/methods/"+method+"/params", orNothing(send["params"])); perr != nil {
					t.Errorf("step %d: the server takes params the contract forbids: %v", i, perr)
				}
			}
			if err != nil {
				t.Errorf("step %d: %s: %v", i, body, err)
			}
		}
	})
	for name := range c.Methods {
		if !tried[name] {
			t.Errorf("the dialogue has no good %s", name)
		}
	}
	for name := range c.Events {
		if !tried[name] {
			t.Errorf("the dialogue has no %s", name)
		}
	}
}

// fromServer reports whether the server refused the params, rather than a tool.
func fromServer(got map[string]any) bool {
	e, _ := got["error"].(map[string]any)
	data, _ := e["data"].(map[string]any)
	return e["message"] == "invalid_params" && data["code"] == nil
}

func orNothing(v any) any {
	if v == nil {
		return map[string]any{}
	}
	return v
}

// fill puts what cannot be written down beforehand in place of $ words: the time of
// the bubble, and a session id that is one.
func fill(want, got any) any {
	switch want := want.(type) {
	case map[string]any:
		out := map[string]any{}
		g, _ := got.(map[string]any)
		for k, v := range want {
			out[k] = fill(v, g[k])
		}
		return out
	case string:
		if want == "$uuid4" && uuid4.MatchString(fmt.Sprint(got)) {
			return got
		}
		if plus, ok := strings.CutPrefix(want, "$now"); ok {
			ms, _ := strconv.Atoi(plus)
			return float64(time.Now().UnixMilli() + int64(ms))
		}
	}
	return want
}

// TestContractParams checks that server and schemas accept the same params. The server
// accepts what it does not answer with invalid_params.
func TestContractParams(t *testing.T) {
	c, compiler := readContract(t)
	values := []string{`null`, `true`, `0`, `1`, `-1`, `99`, `100`, `1000`, `1000.0`, `1000.5`, `60000`, `60001`, `600000`, `600001`,
		`""`, `"x"`, `[]`, `["cpu"]`, `["memory","mem"]`, `["gpu"]`, `[1]`, `["metrics_stream"]`, `{}`, `{"cpu":100}`, `{"memory":60000}`, `{"cpu":99}`, `{"gpu":1000}`, `{"cpu":"1"}`}
	good := map[string]string{
		"app_version": `"1"`, "protocol_version": `1`, "token": `"x"`, "interval_ms": `1000`, "ttl_ms": `1000`, "enable": `true`, "from_ts": `0`, "to_ts": `0`, "tool": `"x"`,
	}
	o := wholeOptions()
	o.Call = func(_ context.Context, _ string, args json.RawMessage) (json.RawMessage, error) { return args, nil }
	inBubble(t, o, func(t *testing.T, r *rig) {
		p := r.peer().hello("")
		n := 0
		for method, m := range c.Methods {
			schema := compiler.MustCompile("contract.json#/methods/" + method + "/params")
			props, _ := m.Params.(map[string]any)["properties"].(map[string]any)
			required, _ := m.Params.(map[string]any)["required"].([]any)
			names := append(slices.Collect(maps.Keys(props)), "surprise")
			for _, name := range names {
				for _, value := range values {
					var b strings.Builder
					fmt.Fprintf(&b, `{%q:%s`, name, value)
					for _, req := range required {
						if req != name {
							fmt.Fprintf(&b, `,%q:%s`, req, good[req.(string)])
						}
					}
					b.WriteString("}")
					v, err := jsonschema.UnmarshalJSON(strings.NewReader(b.String()))
					if err != nil {
						t.Fatal(err)
					}
					n++
					allowed := schema.Validate(v) == nil
					if _, known := props[name]; known && value == "null" && !slices.Contains(required, any(name)) {
						allowed = true // the server takes null for not there
					}
					if method == MethodBurst {
						r.srv.mu.Lock()
						r.srv.sampling.bursts = nil // so that another one fits
						r.srv.mu.Unlock()
					}
					if m := p.call(method, b.String()); (m["error"] == nil) != allowed {
						t.Errorf("%s %s: the contract says %v, the server %v", method, b.String(), allowed, m)
					}
				}
			}
		}
		if n < 300 {
			t.Errorf("only %d params were tried", n)
		}
	})
}
