package stages

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/strictjson"
	"agentctl/transport/edge"
)

// A packed payload is an envelope in place of the payload:
//
// 	{"agentctl/packed": {"alg": "gzip", "bytes": 5120, "data": "H4sIAAAA..."}}
//
// 	request  arguments that are an envelope are unpacked, to at most 1 MiB
// 	result   structuredContent becomes the envelope of a Payload when the request's
// 	         _meta has agentctl/accept; _meta of the result gets agentctl/encoding

// Bounds of compress.
const (
	minPack   = 256     // bytes; a smaller payload would not shrink
	maxUnpack = 1 << 20 // bytes of unpacked arguments, as of an HTTP request's body
)

// MIMEPacked is the type of a packed resource.
const MIMEPacked = "application/vnd.agentctl.packed+json"

// envelope replaces a packed payload: {"agentctl/packed": {"alg", "bytes", "data"}}.
type envelope struct {
	Packed *packed `json:"agentctl/packed"`
}

// packed is a payload in its packed form.
type packed struct {
	Alg   string `json:"alg"`   // "gzip"
	Bytes int    `json:"bytes"` // size of the payload before packing
	Data  []byte `json:"data"`  // base64 in JSON
}

// envelopeKey saves work: arguments without these bytes are not decoded as an envelope.
var envelopeKey = []byte(`"agentctl/packed"`)

// ErrPacked is returned by Unpack for an envelope that is malformed, too large, or of
// another size than it declares.
var ErrPacked = errors.New("stages: not a packed payload of the declared size")

// Pack puts a payload into an envelope, a JSON object. It packs payloads of any size, also when
// the envelope is larger than the payload; the stage compares the sizes.
func Pack(payload []byte) []byte { return pack(payload, gzip.DefaultCompression) }

// gzipWriters are reused: a gzip.Writer allocates about 800 KiB.
var gzipWriters [gzip.BestCompression + 2]sync.Pool // of *gzip.Writer, by level + 1

// pack is Pack with a level of compress/gzip, which the configuration has checked.
func pack(payload []byte, level int) []byte {
	var buf bytes.Buffer
	pool := &gzipWriters[level+1]
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

// Unpack returns the payload of an envelope, which has at most maxBytes. It never inflates
// more than the envelope declares, plus one byte that shows a false declaration: a small
// envelope must not take much memory.
func Unpack(env []byte, maxBytes int) ([]byte, error) {
	var e envelope
	if strictjson.Unmarshal(env, &e) != nil || e.Packed == nil || e.Packed.Alg != "gzip" || e.Packed.Bytes < 0 || e.Packed.Bytes > maxBytes {
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

// Payload is the part of a tool's result that is packed.
type Payload struct {
	Structured json.RawMessage   `json:"structured,omitempty"`
	Content    []json.RawMessage `json:"content,omitempty"`
}

// compressor packs results for clients that ask for it (MetaAccept), or for all with
// Force, and unpacks packed arguments, so that plugins see plain ones. Structured result
// and content are packed together into the structured result; the data of a resource is
// packed into its data. It does not pack payloads that would not shrink, errors, and metric
// streams, whose frames must not be compressed (RFC-0009 §10).
type compressor struct {
	cfg struct {
		// MinBytes is the size from which payloads are packed.
		MinBytes int `json:"min_bytes"`
		// Force packs for clients that did not ask for it, too.
		Force bool `json:"force"`
		// Level is from 1, fast, to 9, small.
		Level int `json:"level"`
	}
}

// newCompress makes the stage. The key "streams" exists only for its error: it explains to an
// operator why streams cannot be compressed.
func newCompress(_ *env, config []byte) (stage, error) {
	c := &compressor{}
	c.cfg.MinBytes, c.cfg.Level = 1024, 6
	streams := false
	err := decode("compress", config,
		intField("min_bytes", &c.cfg.MinBytes, minPack, maxUnpack),
		boolField("force", &c.cfg.Force),
		intField("level", &c.cfg.Level, gzip.BestSpeed, gzip.BestCompression),
		field{"streams", &streams, "only false: metric streams are never compressed (RFC-0009)", func() bool { return !streams }})
	return c, err
}

func (c *compressor) config() any { return c.cfg }

// wrap unpacks the arguments before the inner stages run and packs the result after them. It
// does not pack a result that the plugin has already packed, nor one that goes to a plugin.
func (c *compressor) wrap(next kernel.Handler) kernel.Handler {
	return func(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
		if r.Inner {
			return next(ctx, r)
		}
		if bytes.Contains(r.Arguments, envelopeKey) {
			if err := unpackArguments(r); err != nil {
				return nil, err
			}
		}
		res, err := next(ctx, r)
		if err != nil || res == nil || res.Stream != nil || res.RPCError != nil || len(res.InputRequests) > 0 ||
			(!c.cfg.Force && !edge.AcceptsGzip(metaString(r.Meta, MetaAccept))) || metaString(res.Meta, MetaEncoding) != "" {
			return res, err
		}
		if r.Method == kernel.MethodRead {
			return c.packData(res), nil
		}
		return c.packResult(res), nil
	}
}

// unpackArguments replaces packed arguments by plain ones. Arguments that contain the key
// of an envelope but are not an envelope stay unchanged; the tool's schema decides.
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

// packResult packs the result of a call, if that makes it smaller.
func (c *compressor) packResult(res *kernel.Result) *kernel.Result {
	size := len(res.Structured)
	for _, block := range res.Content {
		size += len(block)
	}
	if size < c.cfg.MinBytes {
		return res
	}
	plain, err := json.Marshal(Payload{res.Structured, res.Content})
	if err != nil {
		return res // not JSON: the reader reports it
	}
	env := pack(plain, c.cfg.Level)
	if len(env)+len(packedNote) >= size {
		return res
	}
	out := withMeta(res, MetaEncoding, "gzip")
	out.Structured, out.Content = env, []json.RawMessage{json.RawMessage(packedNote)}
	return out
}

// packedNote is the content of a packed result. Without content an endpoint would repeat
// the envelope as text.
const packedNote = `{"type":"text","text":"The result is packed in structuredContent."}`

// packData packs the data of a resource, if that makes it smaller.
func (c *compressor) packData(res *kernel.Result) *kernel.Result {
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
