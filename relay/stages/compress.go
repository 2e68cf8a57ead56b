package stages

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
)

// Bounds of compress.
const (
	minPack   = 256     // bytes; less never gets smaller
	maxUnpack = 1 << 20 // bytes of unpacked arguments, as of a request's body
)

// MIMEPacked is the type of a packed resource.
const MIMEPacked = "application/vnd.agentctl.packed+json"

// envelope marks a packed payload: {"agentctl/packed": {...}} stands where it was.
type envelope struct {
	Packed *packed `json:"agentctl/packed"`
}

type packed struct {
	Alg   string `json:"alg"`   // gzip
	Bytes int    `json:"bytes"` // unpacked
	Data  []byte `json:"data"`  // base64
}

var envelopeKey = []byte(`"agentctl/packed"`)

// ErrPacked is returned by Unpack for what is no good envelope.
var ErrPacked = errors.New("stages: not a packed payload of the size that it tells")

// Pack puts a payload into an envelope, a JSON object.
func Pack(payload []byte) []byte { return pack(payload, gzip.DefaultCompression) }

var writers [gzip.BestCompression + 2]sync.Pool // of *gzip.Writer, by level

func pack(payload []byte, level int) []byte {
	var buf bytes.Buffer
	pool := &writers[level+1]
	w, ok := pool.Get().(*gzip.Writer)
	if !ok {
		w, _ = gzip.NewWriterLevel(&buf, level) // the level has been checked
	}
	w.Reset(&buf)
	_, _ = w.Write(payload) // a buffer takes everything
	_ = w.Close()
	pool.Put(w)
	return encode(envelope{&packed{Alg: "gzip", Bytes: len(payload), Data: buf.Bytes()}})
}

// Unpack takes a payload of at most `most` bytes out of its envelope.
func Unpack(env []byte, most int) ([]byte, error) {
	var e envelope
	if strictjson.Unmarshal(env, &e) != nil || e.Packed == nil || e.Packed.Alg != "gzip" || e.Packed.Bytes < 0 || e.Packed.Bytes > most {
		return nil, ErrPacked
	}
	zr, err := gzip.NewReader(bytes.NewReader(e.Packed.Data))
	if err != nil {
		return nil, ErrPacked
	}
	out, err := io.ReadAll(io.LimitReader(zr, int64(e.Packed.Bytes)+1))
	if err != nil || len(out) != e.Packed.Bytes {
		return nil, ErrPacked
	}
	return out, nil
}

// Payload is what is packed of a tool's result.
type Payload struct {
	Structured json.RawMessage   `json:"structured,omitempty"`
	Content    []json.RawMessage `json:"content,omitempty"`
}

// compressor packs results for clients that ask for it (MetaAccept), or for all, and
// unpacks packed arguments. Plugins see plain ones. The structured result and the
// content are packed together into the structured result, the data of a resource into
// its data. What would not get smaller stays as it is; so do errors and metric streams,
// whose frames RFC-0009 §10 forbids to compress.
type compressor struct {
	cfg struct {
		MinBytes int  `json:"min_bytes"` // smaller payloads stay as they are
		Force    bool `json:"force"`     // pack for clients that did not ask, too
		Level    int  `json:"level"`     // 1 fast to 9 small
	}
}

func newCompress(_ *env, config []byte) (stage, error) {
	c := &compressor{}
	c.cfg.MinBytes, c.cfg.Level = 1024, 6
	wantMin := fmt.Sprintf("a whole number from %d to %d", minPack, maxUnpack)
	streams := false
	err := decode("compress", config,
		field{"min_bytes", &c.cfg.MinBytes, wantMin},
		field{"force", &c.cfg.Force, "true or false"},
		field{"level", &c.cfg.Level, "a whole number from 1 to 9"},
		field{"streams", &streams, wantNoStreams})
	switch {
	case err != nil:
	case streams:
		err = wrong("compress.streams", wantNoStreams)
	case c.cfg.MinBytes < minPack || c.cfg.MinBytes > maxUnpack:
		err = wrong("compress.min_bytes", wantMin)
	case c.cfg.Level < 1 || c.cfg.Level > 9:
		err = wrong("compress.level", "a whole number from 1 to 9")
	}
	return c, err
}

const wantNoStreams = "only false: metric streams are never compressed (RFC-0009)"

func (c *compressor) config() any { return c.cfg }

func (c *compressor) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if bytes.Contains(r.Arguments, envelopeKey) {
			if err := unpackArguments(r); err != nil {
				return nil, err
			}
		}
		res, err := next(ctx, r)
		if err != nil || res == nil || res.Stream != nil || res.RPCError != nil || len(res.InputRequests) > 0 ||
			(!c.cfg.Force && !acceptsGzip(text(r.Meta, MetaAccept))) || text(res.Meta, MetaEncoding) != "" {
			return res, err
		}
		if r.Method == kernel.MethodRead {
			return c.data(res), nil
		}
		return c.result(res), nil
	}
}

// acceptsGzip reads a list like that of Accept-Encoding. The star is not meant: who sends
// it does not know of envelopes.
func acceptsGzip(list string) bool {
	for item := range strings.SplitSeq(list, ",") {
		coding, weight, _ := strings.Cut(strings.TrimSpace(item), ";")
		q, weighed := strings.CutPrefix(strings.TrimSpace(weight), "q=")
		if strings.TrimSpace(coding) == "gzip" && !(weighed && strings.Trim(q, "0.") == "") {
			return true
		}
	}
	return false
}

// unpackArguments takes a request's arguments out of their envelope. Arguments that
// merely quote the key are left alone: the tool's schema judges them.
func unpackArguments(r *kernel.Request) error {
	var e envelope
	if strictjson.Unmarshal(r.Arguments, &e) != nil || e.Packed == nil {
		return nil
	}
	args, err := Unpack(r.Arguments, maxUnpack)
	if err == nil {
		err = strictjson.Check(args)
	}
	if args = bytes.TrimSpace(args); err != nil || len(args) == 0 || args[0] != '{' {
		return &manifest.Error{Code: manifest.BadRequest, Message: "the packed arguments do not unpack to a strict JSON object of at most 1 MiB", Reason: "packed"}
	}
	r.Arguments = args
	return nil
}

func (c *compressor) result(res *kernel.Result) *kernel.Result {
	size := len(res.Structured)
	for _, block := range res.Content {
		size += len(block)
	}
	if size < c.cfg.MinBytes {
		return res
	}
	plain, err := json.Marshal(Payload{res.Structured, res.Content})
	if err != nil {
		return res // not JSON: whoever reads it will say so
	}
	env := pack(plain, c.cfg.Level)
	if len(env)+len(packedNote) >= size {
		return res
	}
	out := withMeta(res, MetaEncoding, "gzip")
	out.Structured, out.Content = env, []json.RawMessage{json.RawMessage(packedNote)}
	return out
}

// packedNote keeps a door from repeating the envelope as text.
const packedNote = `{"type":"text","text":"The result is packed in structuredContent."}`

func (c *compressor) data(res *kernel.Result) *kernel.Result {
	if len(res.Data) < c.cfg.MinBytes || res.Resource == nil {
		return res
	}
	env := pack(res.Data, c.cfg.Level)
	if len(env) >= len(res.Data) {
		return res
	}
	out := withMeta(res, MetaEncoding, "gzip")
	resource := *res.Resource
	resource.MIME = MIMEPacked
	out.Resource, out.Data = &resource, env
	return out
}
