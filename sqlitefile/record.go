package sqlitefile

import (
	"encoding/binary"
	"math"
)

// A record is the content of a row (fileformat2.html §2.1): a header with its own length and the serial
// type of each column, all varints, and behind that the values. The serial types are:
//
//	0         NULL
//	1 … 4     an integer of that many bytes, big-endian, two's complement
//	5, 6      an integer of 6 and of 8 bytes
//	7         a float of 8 bytes
//	8, 9      the integers 0 and 1, without a byte of content
//	10, 11    not used in files
//	12, 14 …  a blob of (n-12)/2 bytes
//	13, 15 …  a text of (n-13)/2 bytes

// Bounds of a record. agentctl writes none that exceeds them, so that such a cell is taken for damaged.
const (
	maxColumns = 64
	maxPayload = 1 << 20 // bytes
)

// Kind is the storage class of a value.
type Kind uint8

// The storage classes of SQLite.
const (
	Null Kind = iota
	Integer
	Float
	Text
	Blob
)

// Value is one column of a record. A column that is the table's INTEGER PRIMARY KEY is Null: its
// value is the record's RowID.
type Value struct {
	Kind  Kind
	Int   int64   // of an Integer
	Float float64 // of a Float
	Bytes []byte  // of a Text or Blob; valid until the next record
}

// varint reads a variable-length integer and returns its length, 0 if b is too short. Unlike one of
// encoding/binary it begins with the high bits, and its ninth byte has no continuation bit.
func varint(b []byte) (v uint64, n int) {
	for i := range min(len(b), 9) {
		if i == 8 {
			return v<<8 | uint64(b[i]), 9
		}
		v = v<<7 | uint64(b[i]&0x7f)
		if b[i] < 0x80 {
			return v, i + 1
		}
	}
	return 0, 0
}

// parseRecord appends the columns of a record to values. It accepts only a record whose header
// and content have exactly the length of the payload, as SQLite writes them.
func parseRecord(payload []byte, values []Value) ([]Value, bool) {
	size, n := varint(payload)
	if n == 0 || size < uint64(n) || size > uint64(len(payload)) {
		return nil, false
	}
	header, content := payload[n:size], payload[size:]
	for len(header) > 0 {
		serial, n := varint(header)
		if n == 0 || len(values) == maxColumns {
			return nil, false
		}
		header = header[n:]
		length := serialLength(serial)
		if length < 0 || length > len(content) {
			return nil, false
		}
		values = append(values, parseValue(serial, content[:length]))
		content = content[length:]
	}
	return values, len(content) == 0 && len(values) > 0
}

// serialLength returns the number of content bytes of a serial type, -1 if it is not one.
func serialLength(serial uint64) int {
	switch {
	case serial <= 4:
		return int(serial)
	case serial == 5:
		return 6
	case serial <= 7:
		return 8
	case serial <= 9:
		return 0
	case serial < 12 || serial > 2*maxPayload+13:
		return -1
	}
	return int(serial-12) / 2
}

func parseValue(serial uint64, b []byte) Value {
	switch {
	case serial == 0:
		return Value{}
	case serial == 7:
		return Value{Kind: Float, Float: math.Float64frombits(binary.BigEndian.Uint64(b))}
	case serial == 8, serial == 9:
		return Value{Kind: Integer, Int: int64(serial - 8)}
	case serial < 7:
		v := int64(0)
		if b[0] >= 0x80 {
			v = -1 // the sign
		}
		for _, c := range b {
			v = v<<8 | int64(c)
		}
		return Value{Kind: Integer, Int: v}
	case serial%2 == 0:
		return Value{Kind: Blob, Bytes: b}
	}
	return Value{Kind: Text, Bytes: b}
}
