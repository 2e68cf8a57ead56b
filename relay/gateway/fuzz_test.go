package gateway

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"agentctl/transport/sse"
)

// FuzzFrame: whatever is accepted is one event on the wire, with the data that was
// posted, whoever reads it; nothing can become a separate line.
func FuzzFrame(f *testing.F) {
	f.Add("a/b", []byte(`{"a":1}`))
	f.Add("a\nid: 1", []byte(`1`))
	f.Add("a", []byte("[1,\r\n2]"))
	f.Add("a", []byte("\"\\n\u2028\""))
	f.Fuzz(func(t *testing.T, topic string, data []byte) {
		posted := bytes.Clone(data)
		data, err := normalizeEvent(topic, data, MaxData)
		if err != nil {
			return
		}
		e := Event{ID: 7, Topic: topic, Data: data, TimeMS: 1}
		for _, s := range []*signer{nil, newSigner([]byte("k"))} {
			r := sse.NewReader(bytes.NewReader(append(s.encode(&e, s.digest(data)).frame, "data: end\n\n"...)), sse.ReaderOptions{})
			ev, err := r.Next()
			if err != nil || ev.Type != topic || ev.LastEventID != "7" {
				t.Fatalf("%+v %v", ev, err)
			}
			got, _, _ := strings.Cut(string(ev.Data), "\n")
			var want bytes.Buffer
			if len(posted) == 0 {
				want.WriteString("null")
			} else if err := json.Compact(&want, posted); err != nil {
				t.Fatalf("%q was accepted: %v", posted, err)
			}
			if got != want.String() {
				t.Fatalf("%q became %q", want.String(), got)
			}
			if ev, err := r.Next(); err != nil || string(ev.Data) != "end" {
				t.Fatalf("more than one event: %+v %v", ev, err)
			}
		}
	})
}
