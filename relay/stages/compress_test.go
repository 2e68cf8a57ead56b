package stages_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

// asksForGzip is the _meta of a client that takes packed results.
const asksForGzip = `{"agentctl/accept":"gzip"}`

// compressible is a document of 8 KB that gzip makes much smaller.
var compressible = `{"rows":[` + strings.Repeat(`{"cpu_pct":12.5,"mem_bytes":1048576},`, 200) + `{}]}`

// incompressible returns n characters that gzip cannot make smaller than base64 makes it larger.
func incompressible(n int) string {
	const alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"
	random := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, n)
	for i := range b {
		b[i] = alphabet[random.IntN(len(alphabet))]
	}
	return string(b)
}

func structured(doc string) kernel.Result { return kernel.Result{Structured: json.RawMessage(doc)} }

// TestPackedResults: a result is packed if the client takes it packed, or the operator forces that,
// and if packing makes it smaller.
func TestPackedResults(t *testing.T) {
	block := json.RawMessage(`{"type":"text","text":"<a & b>` + strings.Repeat("x", 2000) + `"}`)
	const never, ifAsked, ifForced = 0, 1, 2
	tests := []struct {
		name, meta string
		result     kernel.Result
		packed     int
	}{
		{"gzip is accepted", asksForGzip, structured(compressible), ifAsked},
		{"gzip is accepted, as in a header", `{"agentctl/accept":"br;q=1.0, gzip;q=0.8, *"}`, structured(compressible), ifAsked},
		{"structured result and content", asksForGzip, kernel.Result{Structured: json.RawMessage(compressible), Content: []json.RawMessage{block}}, ifAsked},
		{"content only", asksForGzip, kernel.Result{Content: []json.RawMessage{block, block}}, ifAsked},
		{"nothing is accepted", "", structured(compressible), ifForced},
		{"gzip is refused", `{"agentctl/accept":"br, gzip;q=0.0, *"}`, structured(compressible), ifForced},
		{"below min_bytes", asksForGzip, structured(`{"a":"` + strings.Repeat("x", 1000) + `"}`), never},
		{"incompressible", asksForGzip, structured(`{"a":"` + incompressible(1100) + `"}`), never},
		{"packed by the plugin", asksForGzip, kernel.Result{Structured: json.RawMessage(compressible), Meta: json.RawMessage(`{"agentctl/encoding":"gzip"}`)}, never},
		{"a request for input", asksForGzip, kernel.Result{InputRequests: json.RawMessage(compressible)}, never},
		{"a JSON-RPC error", asksForGzip, kernel.Result{RPCError: &kernel.RPCError{Message: compressible}}, never},
	}
	for _, force := range []bool{false, true} {
		for _, tt := range tests {
			t.Run(fmt.Sprintf("force %v/%s", force, tt.name), func(t *testing.T) {
				given := tt.result
				k, m := newKernel(t, stages.Options{}, &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) { return &given, nil }})
				enable(t, m, "compress", fmt.Sprintf(`{"force":%v}`, force))
				for range 2 { // the plugin returns the same result again
					got, err := k.Call(t.Context(), request(agent(), "p.do", "", tt.meta))
					if err != nil {
						t.Fatal(err)
					}
					if tt.packed == ifAsked || force && tt.packed == ifForced {
						wantPacked(t, got, &tt.result)
					} else {
						wantUnchanged(t, got, &tt.result)
					}
				}
				wantUnchanged(t, &given, &tt.result) // a plugin may return one result to several callers
			})
		}
	}
}

// wantUnchanged checks that a result is the one that the plugin returned.
func wantUnchanged(t *testing.T, got, want *kernel.Result) {
	t.Helper()
	if string(got.Structured) != string(want.Structured) || len(got.Content) != len(want.Content) || string(got.Meta) != string(want.Meta) {
		t.Errorf("got %.80s with _meta %s, want %.80s with _meta %s", got.Structured, got.Meta, want.Structured, want.Meta)
	}
}

// wantPacked checks that a result unpacks to the plugin's, and has at most half of its size.
func wantPacked(t *testing.T, got, want *kernel.Result) {
	t.Helper()
	plain, err := stages.Unpack(got.Structured, 1<<20)
	if err != nil || string(got.Meta) != `{"agentctl/encoding":"gzip"}` {
		t.Fatalf("got %.80s (%v) with _meta %s, want an envelope with the encoding in _meta", got.Structured, err, got.Meta)
	}
	var payload stages.Payload
	if err := json.Unmarshal(plain, &payload); err != nil || string(payload.Structured) != string(want.Structured) || len(payload.Content) != len(want.Content) {
		t.Fatalf("unpacked to %.80s (%v), want %.80s with %d blocks of content", plain, err, want.Structured, len(want.Content))
	}
	size := len(want.Structured)
	for i, block := range want.Content {
		size += len(block)
		if !sameJSON(block, payload.Content[i]) {
			t.Errorf("block %d of the content is %.80s, want %.80s", i, payload.Content[i], block)
		}
	}
	if packed := len(got.Structured) + len(got.Content[0]); packed*2 > size {
		t.Errorf("%d bytes were packed to %d, want at most half", size, packed)
	}
}

func sameJSON(a, b []byte) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && fmt.Sprint(x) == fmt.Sprint(y)
}

// TestPackedRead: the data of a resource is packed in place, and has another type then.
func TestPackedRead(t *testing.T) {
	k, m := newKernel(t, stages.Options{}, &plugin{name: "p", read: compressible})
	enable(t, m, "compress", `{"force":true}`)
	res, data, err := k.Read(t.Context(), agent(), "mcp://p/all.json")
	if err != nil {
		t.Fatal(err)
	}
	if plain, err := stages.Unpack(data, 1<<20); err != nil || string(plain) != compressible {
		t.Errorf("unpacked to %.80s (%v), want %.80s", plain, err, compressible)
	}
	if res.MIME != stages.MIMEPacked || len(data)*2 > len(compressible) {
		t.Errorf("%d bytes of %s, want at most half of %d of %s", len(data), res.MIME, len(compressible), stages.MIMEPacked)
	}
}

// TestStreamIsNotPacked: frames of streams are never compressed (RFC-0009 §10), also by force.
func TestStreamIsNotPacked(t *testing.T) {
	for _, force := range []bool{false, true} {
		k, m := newKernel(t, stages.Options{})
		enable(t, m, "compress", fmt.Sprintf(`{"force":%v}`, force))
		d := loadDevice(t, k)
		res, err := k.Call(t.Context(), &kernel.Request{Caller: agent(), Tool: d.stream(), Stream: true, Meta: json.RawMessage(asksForGzip)})
		if err != nil || res.Stream != (stream{}) || res.Meta != nil || res.Structured != nil {
			t.Errorf("force %v: got %+v, %v; want the stream alone", force, res, err)
		}
	}
}

// TestUnpackArguments: the plugin gets packed arguments unpacked, and others as they are. A package
// that is malformed or larger than it declares is refused.
func TestUnpackArguments(t *testing.T) {
	p := &plugin{name: "p"}
	k, m := newKernel(t, stages.Options{}, p)
	enable(t, m, "compress", `{}`)
	args := `{"message":"` + strings.Repeat("hello ", 1000) + `"}`
	good := string(stages.Pack([]byte(args)))
	bomb := string(stages.Pack([]byte(`{"a":"` + strings.Repeat(" ", 1<<20) + `"}`)))
	understated := strings.Replace(string(stages.Pack([]byte(`{"a":"`+strings.Repeat(" ", 1<<16)+`"}`))), fmt.Sprint(`"bytes":`, 1<<16+8), `"bytes":100`, 1)
	if !strings.Contains(understated, `"bytes":100`) {
		t.Fatal("the declared size was not replaced")
	}
	const refused = ""
	for name, tt := range map[string]struct{ sent, received string }{
		"packed":              {good, args},
		"with white space":    {" " + strings.Replace(good, ":", " : ", 1), args},
		"the key in a string": {`{"x":"\"agentctl/packed\""}`, `{"x":"\"agentctl/packed\""}`},
		"the key, not alone":  {`{"agentctl/packed":{},"x":1}`, `{"agentctl/packed":{},"x":1}`},
		"plain":               {`{"x":1}`, `{"x":1}`},
		"more than 1 MiB":     {bomb, refused},
		"more than declared":  {understated, refused},
		"no object":           {string(stages.Pack([]byte(`[1]`))), refused},
		"nothing":             {string(stages.Pack(nil)), refused},
		"a key twice":         {string(stages.Pack([]byte(`{"a":1,"a":2}`))), refused},
		"no gzip":             {`{"agentctl/packed":{"alg":"gzip","bytes":3,"data":"AAAA"}}`, refused},
		"another algorithm":   {strings.Replace(good, "gzip", "zstd", 1), refused},
		"truncated":           {truncated(t, good), refused},
		"a negative size":     {`{"agentctl/packed":{"alg":"gzip","bytes":-1,"data":"AAAA"}}`, refused},
		"packed twice":        {string(stages.Pack([]byte(good))), good},
	} {
		r := request(agent(), "p.do", tt.sent, "")
		for range 2 { // a retry of the same request, whose arguments are plain by then
			_, err := k.Call(t.Context(), r)
			if tt.received == refused {
				wantCode(t, name, err, manifest.BadRequest, "packed")
			} else if err != nil || p.last() != tt.received {
				t.Errorf("%s: the plugin got %.60s (%v), want %.60s", name, p.last(), err, tt.received)
			}
			if name == "packed twice" {
				break
			}
		}
	}
}

// truncated keeps half of the data in an envelope.
func truncated(t *testing.T, env string) string {
	t.Helper()
	head, data, ok := strings.Cut(env, `"data":"`)
	if !ok {
		t.Fatal("no envelope")
	}
	return head + `"data":"` + data[:len(data)/8*4] + `"}}`
}
