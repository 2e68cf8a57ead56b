package control

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"

	"agentctl/prober"

	"github.com/go-json-experiment/json/jsontext"
)

// An item of query_history is an object with the time and a member for each module that
// has a value, all derived from the sensor catalogue:
//
//	{"ts":1700000000000,"cpu":{"usage_percent":1.5},"power":{"under_voltage":false}}

// itemSensors are the sensors that an item can have, by key.
var itemSensors = func() map[string]*prober.Sensor {
	byKey := map[string]*prober.Sensor{}
	sensors := prober.Sensors()
	for i := range sensors {
		if s := &sensors[i]; s.Key != "" {
			byKey[s.Key] = s
		}
	}
	return byKey
}()

// itemWriter appends values to an item, grouped by module.
type itemWriter struct {
	b []byte
	// module is that of the last value; its member is not closed while isOpen is set.
	module prober.Module
	isOpen bool
}

// add appends a value of the same module as the one before, or of a later one. A value
// that has no form in JSON is left out.
func (w *itemWriter) add(s *prober.Sensor, v float64) {
	if math.IsNaN(v) || math.IsInf(v, 0) || s.Form == prober.FormState && !isState(v) {
		return
	}
	if w.isOpen && w.module == s.Module {
		w.b = append(w.b, ',')
	} else {
		w.close()
		w.module, w.isOpen = s.Module, true
		w.b = append(append(append(w.b, `,"`...), s.Module.Member()...), `":{`...)
	}
	w.b = append(append(append(w.b, '"'), s.Key[len(s.Module.Member())+1:]...), `":`...)
	switch i := int64(v); {
	case s.Form == prober.FormFlag:
		w.b = strconv.AppendBool(w.b, v != 0)
	case s.Form == prober.FormState:
		w.b = strconv.AppendQuote(w.b, prober.EOLStates[i])
	case float64(i) == v && i > 0: // several times as fast
		w.b = strconv.AppendInt(w.b, i, 10)
	default:
		w.b = strconv.AppendFloat(w.b, v, 'f', -1, 64)
	}
}

// close ends the member of the module, if one has begun.
func (w *itemWriter) close() {
	if w.isOpen {
		w.b, w.isOpen = append(w.b, '}'), false
	}
}

// isState reports whether v is an index in prober.EOLStates.
func isState(v float64) bool {
	return v == math.Trunc(v) && v >= 0 && int(v) < len(prober.EOLStates)
}

// appendTS begins an item with its time; the caller adds the closing brace.
func appendTS(b []byte, ts int64) []byte {
	return strconv.AppendInt(append(b, `{"ts":`...), ts, 10)
}

// appendRow appends the values of the modules in set as an item, or nothing when row has
// none. Equal rows give equal bytes, which query_history's second pass relies on: it writes
// as many as the first pass counted.
func appendRow(b []byte, set prober.ModuleSet, row *HistoryRow) []byte {
	begin := len(b)
	w := itemWriter{b: appendTS(b, row.TS)}
	bare := len(w.b)
	sensors := prober.Sensors()
	for i := range sensors {
		s := &sensors[i]
		if row.Sample == nil || s.Module.IsOptional() {
			break
		}
		if s.Key == "" || !set.Has(s.Module) {
			continue
		}
		if v, known := s.Read(row.Sample); known {
			w.add(s, v)
		}
	}
	for m := range prober.NumModules {
		for i := range row.Readings {
			r := &row.Readings[i]
			if !m.IsOptional() || !set.Has(m) || !strings.HasPrefix(r.Key, m.Member()) {
				continue
			}
			if s := itemSensors[r.Key]; s != nil && s.Module == m {
				w.add(s, r.Value)
			}
		}
	}
	w.close()
	if len(w.b) == bare {
		return w.b[:begin]
	}
	return append(w.b, '}')
}

// rowOf is a sample as it would have been recorded.
func rowOf(sample *prober.Sample) HistoryRow {
	row := HistoryRow{TS: sample.TSMS, Sample: sample}
	for _, s := range prober.Sensors() {
		if s.Record.ID == 0 || s.Read == nil {
			continue
		}
		if v, known := s.Read(sample); known {
			row.Readings = append(row.Readings, prober.Reading{Key: s.Key, Value: v})
		}
	}
	return row
}

// MarshalJSON encodes the item as query_history does, in the order of the catalogue.
func (i HistoryItem) MarshalJSON() ([]byte, error) {
	w := itemWriter{b: appendTS(nil, i.TS)}
	sensors := prober.Sensors()
	for k := range sensors {
		if v, ok := i.Values[sensors[k].Key]; ok {
			w.add(&sensors[k], v)
		}
	}
	w.close()
	return append(w.b, '}'), nil
}

// itemDecoder is reused, because a long history has many items: encoding/json calls
// UnmarshalJSON for each, and a decoder with its buffers for each would be garbage.
type itemDecoder struct {
	jsontext.Decoder
	input bytes.Reader
	key   []byte
}

var itemDecoders = sync.Pool{New: func() any { return new(itemDecoder) }}

// UnmarshalJSON decodes an item of query_history. What the catalogue does not have is
// left out.
func (i *HistoryItem) UnmarshalJSON(b []byte) error {
	*i = HistoryItem{Values: make(map[string]float64, 8)}
	r := itemDecoders.Get().(*itemDecoder)
	defer itemDecoders.Put(r)
	r.input.Reset(b)
	d, key := &r.Decoder, r.key
	d.Reset(&r.input, jsontext.AllowDuplicateNames(true)) // as encoding/json does
	defer func() { r.key = key }()
	return eachMember(d, func(name []byte) error {
		if string(name) == "ts" {
			ts, _, err := decodeValue(d)
			i.TS = int64(ts)
			return err
		}
		key = append(append(key[:0], name...), '.')
		prefix := len(key)
		if d.PeekKind() != '{' {
			return d.SkipValue()
		}
		return eachMember(d, func(field []byte) error {
			s := itemSensors[string(append(key[:prefix], field...))]
			v, known, err := decodeValue(d)
			if s != nil && known {
				i.Values[s.Key] = v
			}
			return err
		})
	})
}

// eachMember reads an object and calls fn with each name, which is valid until fn reads
// the value.
func eachMember(d *jsontext.Decoder, fn func(name []byte) error) error {
	if d.PeekKind() != '{' {
		return errors.New("not an object")
	}
	_, err := d.ReadToken()
	for err == nil && d.PeekKind() == '"' {
		var name jsontext.Value
		if name, err = d.ReadValue(); err == nil {
			err = fn(name[1 : len(name)-1])
		}
	}
	if err == nil {
		_, err = d.ReadToken()
	}
	return err
}

// decodeValue reads a number, a flag or a state; anything else is not known.
func decodeValue(d *jsontext.Decoder) (v float64, known bool, err error) {
	switch d.PeekKind() {
	case '0', 't', 'f', '"':
	default:
		return 0, false, d.SkipValue()
	}
	t, err := d.ReadToken()
	switch {
	case err != nil:
		return 0, false, err
	case t.Kind() == '0':
		v, err := t.Float()
		return v, true, err
	case t.Kind() == '"':
		i := slices.Index(prober.EOLStates, t.String())
		return float64(i), i >= 0, nil
	case t.Bool():
		return 1, true, nil
	}
	return 0, true, nil
}
